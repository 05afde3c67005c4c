/* A model's source: a checkpoint of a training, a run of them, or a Hugging Face directory. See train.h. */
#include "tools/train/train.h"

#include "tools/train/train_file.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_CONFIG = 1 << 24, MOST_TOKENIZER = 1 << 28 };

/* --- Hugging Face -------------------------------------------------------------------------------- */

static bool find_in(const char *directory, const char *name, char path_out[PATH_MAX])
{
    return snprintf(path_out, PATH_MAX, "%s/%s", directory, name) < PATH_MAX &&
           access(path_out, F_OK) == 0;
}

/* Tokenizers that this trainer cannot read: ids of bytes in their place would mean nothing to the model. */
static const char *find_other_tokenizer(const char *path)
{
    static const char *const names[] = {"tokenizer.model", "vocab.json", "merges.txt",
                                        "tokenizer_config.json"};
    char file[PATH_MAX];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (find_in(path, names[i], file))
            return names[i];
    return NULL;
}

static fsdp_status open_hf(const char *path, const char *config, train_source *source,
                           fsdp_error *err)
{
    char file[PATH_MAX];
    source->is_hf = true;
    source->path = strdup(path);
    if (!source->path)
        return fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    FSDP_TRY(train_file_read(config, MOST_CONFIG, &source->config_text, err));
    if (find_in(path, "tokenizer.json", file))
        FSDP_TRY(train_file_read(file, MOST_TOKENIZER, &source->tokenizer_text, err));
    else
        source->other_tokenizer = find_other_tokenizer(path);
    if (find_in(path, "generation_config.json", file))
        FSDP_TRY(train_file_read(file, MOST_CONFIG, &source->generation_text, err));
    if (find_in(path, "tokenizer_config.json", file))
        FSDP_TRY(train_file_read(file, MOST_CONFIG, &source->tokenizer_config_text, err));
    return fsdp_transformer_config_parse(source->config_text.data, source->config_text.size, config,
                                         &source->config, err);
}

/* --- checkpoints --------------------------------------------------------------------------------- */

static const fsdp_value *find_value(const fsdp_sd *sd, const char *name)
{
    int64_t i = fsdp_sd_find(sd, name, strlen(name));
    const fsdp_entry *entry = i < 0 ? NULL : fsdp_sd_at(sd, (size_t)i);
    return entry && entry->kind == FSDP_ENTRY_VALUE ? &entry->value : NULL;
}

static void take_text(const fsdp_sd *sd, const char *name, fsdp_text *text)
{
    const fsdp_value *value = find_value(sd, name);
    if (value && value->kind == FSDP_VALUE_STRING)
        fsdp_text_add(text, value->as.bytes.data, value->as.bytes.size);
}

static fsdp_status take_values(const fsdp_sd *sd, const char *path, train_source *source,
                               fsdp_error *err)
{
    const fsdp_value *data = find_value(sd, "train.data");
    take_text(sd, "train.hf_config", &source->config_text);
    take_text(sd, "train.tokenizer", &source->tokenizer_text);
    take_text(sd, "train.generation_config", &source->generation_text);
    take_text(sd, "train.tokenizer_config", &source->tokenizer_config_text);
    take_text(sd, "train.config", &source->train_config);
    if (source->config_text.size == 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s' is not a checkpoint of fsdp-train: it has neither train.hf_config "
                         "nor a config.json",
                         path);
    if (data)
        FSDP_TRY(fsdp_value_copy(data, &source->data, err));
    return fsdp_transformer_config_parse(source->config_text.data, source->config_text.size, path,
                                         &source->config, err);
}

/* A run whose first save is still to come. */
static bool is_young_run(const char *path)
{
    char metrics[PATH_MAX];
    bool is_run = true;
    return find_in(path, "metrics.jsonl", metrics) &&
           fsdp_path_is_run(path, NULL, &is_run, NULL) == FSDP_OK && !is_run;
}

static fsdp_status open_checkpoint(const char *path, train_source *source, fsdp_error *err)
{
    fsdp_checkpoint *checkpoint = NULL;
    if (is_young_run(path))
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND, "the run '%s' has no checkpoint yet", path);
    FSDP_TRY(fsdp_checkpoint_open(path, NULL, &checkpoint, err));
    const fsdp_checkpoint_info *info = fsdp_checkpoint_describe(checkpoint);
    source->step = info->step;
    source->path = strdup(info->path);
    fsdp_status st = source->path ? take_values(fsdp_checkpoint_sd(checkpoint), path, source, err)
                                  : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    fsdp_checkpoint_close(checkpoint);
    return st;
}

fsdp_status train_source_open(const char *path, train_source *source_out, fsdp_error *err)
{
    char config[PATH_MAX];
    *source_out = (train_source){.step = FSDP_NO_STEP};
    fsdp_status st = find_in(path, "config.json", config) && !fsdp_path_has_manifest(path, NULL)
                         ? open_hf(path, config, source_out, err)
                         : open_checkpoint(path, source_out, err);
    if (st != FSDP_OK)
        train_source_close(source_out);
    return st;
}

void train_source_close(train_source *source)
{
    free(source->path);
    fsdp_text_release(&source->config_text);
    fsdp_text_release(&source->tokenizer_text);
    fsdp_text_release(&source->generation_text);
    fsdp_text_release(&source->tokenizer_config_text);
    fsdp_text_release(&source->train_config);
    fsdp_value_release(&source->data);
    *source = (train_source){0};
}

/* --- parameters ---------------------------------------------------------------------------------- */

/* The base models of transformers, without a head, have names without their first element. */
static const char *strip_first(void *context, const char *name)
{
    const char *dot = strchr(name, '.');
    (void)context;
    return strncmp(name, "lm_head.", 8) == 0 || !dot ? name : dot + 1;
}

/* Whether two tensors of equal dtype and shape have the same bytes, a few rows at a time. */
static fsdp_status compare_rows(fsdp_checkpoint *file, const size_t at[2], const fsdp_entry *entry,
                                bool *is_same_out, fsdp_error *err)
{
    enum { PIECE = 1 << 20 };
    const int64_t rows = entry->shape[0];
    const size_t row = (size_t)entry->shape[1] * fsdp_dtype_size(entry->dtype);
    const int64_t most = row < PIECE ? (int64_t)(PIECE / (row + 1)) + 1 : 1;
    char *a = malloc((size_t)most * row + 1), *b = malloc((size_t)most * row + 1);
    fsdp_status st = a && b ? FSDP_OK : fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    *is_same_out = true;
    for (int64_t first = 0; st == FSDP_OK && *is_same_out && first < rows; first += most) {
        fsdp_box box = fsdp_box_whole(2, entry->shape);
        box.lo[0] = first;
        box.len[0] = rows - first < most ? rows - first : most;
        st = fsdp_checkpoint_read(file, at[0], &box, a, FSDP_CHECK_BLOCKS, err);
        if (st == FSDP_OK)
            st = fsdp_checkpoint_read(file, at[1], &box, b, FSDP_CHECK_BLOCKS, err);
        *is_same_out = st == FSDP_OK && memcmp(a, b, (size_t)box.len[0] * row) == 0;
    }
    free(a);
    free(b);
    return st;
}

/* The name of the embedding in the source. */
static const char *find_embedding(const train_source *source, const fsdp_sd *sd, int64_t *at_out)
{
    const char *name = source->config.form.embedding;
    *at_out = fsdp_sd_find(sd, name, strlen(name));
    if (*at_out >= 0)
        return name;
    name = strchr(name, '.') + 1;
    *at_out = fsdp_sd_find(sd, name, strlen(name));
    return name;
}

/* Two tensors that the config says are one. */
static fsdp_status compare_head(const train_source *source, fsdp_checkpoint *file, fsdp_error *err)
{
    const fsdp_sd *sd = fsdp_checkpoint_sd(file);
    int64_t at;
    const int64_t head_at = fsdp_sd_find(sd, FSDP_NAME("lm_head.weight"));
    const char *name = find_embedding(source, sd, &at);
    const fsdp_entry *embedding = at < 0 ? NULL : fsdp_sd_at(sd, (size_t)at);
    const fsdp_entry *head = head_at < 0 ? NULL : fsdp_sd_at(sd, (size_t)head_at);
    bool is_same;
    if (!head || !embedding || head->kind != FSDP_ENTRY_TENSOR ||
        embedding->kind != FSDP_ENTRY_TENSOR)
        return FSDP_OK;
    is_same = head->dtype == embedding->dtype && head->ndim == 2 && embedding->ndim == 2 &&
              memcmp(head->shape, embedding->shape, 2 * sizeof *head->shape) == 0;
    if (is_same)
        FSDP_TRY(compare_rows(file, (size_t[2]){(size_t)head_at, (size_t)at}, head, &is_same, err));
    if (is_same)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s': 'lm_head.weight' differs from '%s', although the config ties them; set "
                     "\"tie_word_embeddings\": false in its config.json to keep both, as "
                     "transformers does, or remove 'lm_head.weight'",
                     source->path, name);
}

fsdp_status train_source_check_head(const train_source *source, fsdp_error *err)
{
    fsdp_checkpoint *file = NULL;
    if (!source->is_hf || !source->config.is_tied)
        return FSDP_OK;
    FSDP_TRY(fsdp_checkpoint_open(source->path, NULL, &file, err));
    fsdp_status st = compare_head(source, file, err);
    fsdp_checkpoint_close(file);
    return st;
}

static fsdp_status is_base_model(const train_source *source, bool *is_base_out, fsdp_error *err)
{
    const char *whole = source->config.form.embedding, *base = strchr(whole, '.') + 1;
    fsdp_checkpoint *checkpoint = NULL;
    FSDP_TRY(fsdp_checkpoint_open(source->path, NULL, &checkpoint, err));
    const fsdp_sd *sd = fsdp_checkpoint_sd(checkpoint);
    *is_base_out =
        fsdp_sd_find(sd, whole, strlen(whole)) < 0 && fsdp_sd_find(sd, base, strlen(base)) >= 0;
    fsdp_checkpoint_close(checkpoint);
    return FSDP_OK;
}

/* Buffers that older versions of transformers saved, and that follow from the config. */
static bool is_old_buffer(const char *name)
{
    static const char *const ends[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};
    size_t size = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        size_t end = strlen(ends[i]);
        if (size >= end && strcmp(name + size - end, ends[i]) == 0)
            return true;
    }
    return false;
}

static fsdp_status check_report(const train_source *source, const fsdp_load_report *report,
                                fsdp_error *err)
{
    if (report->missing_count > 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' lacks %zu tensors of its model, first '%s'",
                         source->path, report->missing_count, report->missing[0]);
    for (size_t i = 0; i < report->unexpected_count; i++)
        if (!is_old_buffer(report->unexpected[i]))
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s' has a tensor that its model does not have: '%s'", source->path,
                             report->unexpected[i]);
    return FSDP_OK;
}

fsdp_status train_source_load_model(const train_source *source, fsdp_root *root, fsdp_error *err)
{
    fsdp_load_report report = {0};
    bool is_base = false;
    fsdp_root_load_opts opts = {.state.part = FSDP_STATE_MODEL,
                                .load.cast = true,
                                .load.partial = source->is_hf,
                                .load.report = &report};
    if (source->is_hf) {
        opts.state.model_prefix = "";
        FSDP_TRY(is_base_model(source, &is_base, err));
        if (is_base)
            opts.state.rename = strip_first;
    }
    fsdp_status st = fsdp_root_load(root, source->path, &opts, err);
    if (st == FSDP_OK && source->is_hf)
        st = check_report(source, &report, err);
    fsdp_load_report_release(&report);
    return st;
}
