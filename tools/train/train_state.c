/*
 * Checkpoints of a training, RUN/step-N, and another format next to them: the model that one, or a directory
 * of Hugging Face, has; the values that they hold next to tensors, whether a resume fits them, and saves. A
 * save in the background is begun here and ended by the next one, by the first step after its end, or by the
 * end of the training. See train.h.
 */
#include "tools/train/train.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* === files ==================================================================================== */

static fsdp_status read_all(int fd, const char *path, size_t most, fsdp_text *text, fsdp_error *err)
{
    char piece[1 << 14];
    size_t begin = text->size;
    for (;;) {
        ssize_t n = read(fd, piece, sizeof piece);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fsdp_fail_errno(err, errno, "cannot read '%s'", path);
        if (n == 0)
            return text->failed ? fsdp_fail(err, FSDP_ERR_LIMIT,
                                            "cannot read '%s': it does not fit in memory", path)
                                : FSDP_OK;
        if (text->size - begin + (size_t)n > most)
            return fsdp_fail(err, FSDP_ERR_LIMIT, "cannot read '%s': it has more than %zu bytes",
                             path, most);
        fsdp_text_add(text, piece, (size_t)n);
    }
}

/* Appends the whole text of a file; more than `most` bytes are FSDP_ERR_LIMIT. */
static fsdp_status read_file(const char *path, size_t most, fsdp_text *text, fsdp_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fsdp_fail_errno(err, errno, "cannot open '%s'", path);
    fsdp_status st = read_all(fd, path, most, text, err);
    close(fd);
    return st;
}

/* === the source of a model ==================================================================== */

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
    FSDP_TRY(read_file(config, MOST_CONFIG, &source->config_text, err));
    if (find_in(path, "tokenizer.json", file))
        FSDP_TRY(read_file(file, MOST_TOKENIZER, &source->tokenizer_text, err));
    else
        source->other_tokenizer = find_other_tokenizer(path);
    if (find_in(path, "generation_config.json", file))
        FSDP_TRY(read_file(file, MOST_CONFIG, &source->generation_text, err));
    if (find_in(path, "tokenizer_config.json", file))
        FSDP_TRY(read_file(file, MOST_CONFIG, &source->tokenizer_config_text, err));
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

/* Refuses files that have another head next to the embedding, where the config ties it. */
static fsdp_status check_head(const train_source *source, fsdp_error *err)
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

static fsdp_status load_model(const train_source *source, fsdp_root *root, fsdp_error *err)
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

fsdp_status train_source_load_model(const train_source *source, train_job *job, fsdp_error *err)
{
    fsdp_status st = job->rank == 0 ? check_head(source, err) : FSDP_OK;
    FSDP_TRY(fsdp_ctl_agree(job->ctl, st, err));
    return load_model(source, job->root, err);
}

/* === values next to tensors =================================================================== */

enum { TRAIN_CHANGE_DATA = 1, TRAIN_CHANGE_OPTIM = 2, TRAIN_CHANGE_BATCH = 4 };

/* --- save ---------------------------------------------------------------------------------------- */

static fsdp_status add_text(fsdp_sd *sd, const char *name, const fsdp_text *text, fsdp_error *err)
{
    fsdp_value value = {0};
    fsdp_status st = fsdp_value_set_bytes(&value, FSDP_VALUE_STRING, text->data ? text->data : "",
                                          text->size, err);
    if (st == FSDP_OK)
        st = fsdp_sd_add_value(sd, name, strlen(name), &value, err);
    fsdp_value_release(&value);
    return st;
}

static fsdp_status add_number(fsdp_sd *sd, const char *name, int64_t number, fsdp_error *err)
{
    const fsdp_value value = fsdp_value_i64(number);
    return fsdp_sd_add_value(sd, name, strlen(name), &value, err);
}

static bool is_of_bytes(const fsdp_tokenizer *tokenizer)
{
    size_t size = 0;
    const char *data = tokenizer ? fsdp_tokenizer_text(tokenizer, &size) : "";
    return size == strlen("bytes") && memcmp(data, "bytes", size) == 0;
}

/* The text of a tokenizer.json, also of bytes, so that an export needs nothing else; "": there is none. */
static void add_tokenizer_text(const train_job *job, fsdp_text *text)
{
    size_t size = 0;
    const char *data = job->tokenizer ? fsdp_tokenizer_text(job->tokenizer, &size) : "";
    if (is_of_bytes(job->tokenizer))
        fsdp_tokenizer_add_bytes_json(text);
    else
        fsdp_text_add(text, data, size);
}

/* By the model's family alone, transformers would add special tokens after the vocabulary of bytes. */
static fsdp_status add_tokenizer_config(const train_job *job, fsdp_sd *sd, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_status st = FSDP_OK;
    if (job->tokenizer_config_text.size > 0)
        fsdp_text_add(&text, job->tokenizer_config_text.data, job->tokenizer_config_text.size);
    else if (is_of_bytes(job->tokenizer))
        fsdp_text_addf(&text, "{\"tokenizer_class\": \"PreTrainedTokenizerFast\"}\n");
    if (text.failed)
        st = fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory");
    else if (text.size > 0)
        st = add_text(sd, "train.tokenizer_config", &text, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status add_tokenizer(const train_job *job, fsdp_sd *sd, fsdp_error *err)
{
    fsdp_text text = {0};
    add_tokenizer_text(job, &text);
    fsdp_status st = text.failed ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory")
                                 : add_text(sd, "train.tokenizer", &text, err);
    fsdp_text_release(&text);
    return st;
}

static fsdp_status add_config(const train_job *job, fsdp_sd *sd, fsdp_error *err)
{
    fsdp_text text = {0};
    train_config_print(job->config, &text);
    fsdp_status st = text.failed ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory")
                                 : add_text(sd, "train.config", &text, err);
    fsdp_text_release(&text);
    return st;
}

/* Files and their order, and after them how far the training came in it. */
static fsdp_status describe_data(const train_job *job, fsdp_value *value, fsdp_error *err)
{
    const size_t count = job->data.as.list.count;
    FSDP_TRY(fsdp_value_set_items(value, FSDP_VALUE_DICT, count + 2, err));
    for (size_t i = 0; i < count; i++)
        FSDP_TRY(fsdp_value_copy(&job->data.as.list.items[i], &value->as.list.items[i], err));
    value->as.list.items[count + 1] = fsdp_value_i64(job->consumed);
    return fsdp_value_set_bytes(&value->as.list.items[count], FSDP_VALUE_STRING, "consumed",
                                strlen("consumed"), err);
}

static fsdp_status add_data(const train_job *job, fsdp_sd *sd, fsdp_error *err)
{
    fsdp_value value = {0};
    fsdp_status st = describe_data(job, &value, err);
    if (st == FSDP_OK)
        st = fsdp_sd_add_value(sd, FSDP_NAME("train.data"), &value, err);
    fsdp_value_release(&value);
    return st;
}

/* Adds the values of a checkpoint next to tensors. */
static fsdp_status add_state(const train_job *job, fsdp_sd *sd, fsdp_error *err)
{
    fsdp_world_mark(job->world, "counters");
    FSDP_TRY(add_number(sd, "train.step", job->step, err));
    FSDP_TRY(add_number(sd, "train.tokens", job->tokens, err));
    FSDP_TRY(add_number(sd, "train.seed", job->config->train.seed, err));
    FSDP_TRY(add_data(job, sd, err));
    FSDP_TRY(add_config(job, sd, err));
    FSDP_TRY(add_text(sd, "train.hf_config", &job->model_text, err));
    if (job->generation_text.size > 0)
        FSDP_TRY(add_text(sd, "train.generation_config", &job->generation_text, err));
    FSDP_TRY(add_tokenizer_config(job, sd, err));
    return add_tokenizer(job, sd, err);
}

/* --- resume -------------------------------------------------------------------------------------- */

static fsdp_status fail_change(const train_source *source, const char *what, const char *flag,
                               fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "cannot resume from '%s': it was made with other %s; add --allow-change %s to "
                     "resume with the new",
                     source->path, what, flag);
}

/* Its batches came from --batches, in which train.batch means nothing. */
static bool was_given(const train_source *source)
{
    const fsdp_value *data = &source->data;
    const fsdp_value *first =
        data->kind == FSDP_VALUE_DICT && data->as.list.count > 0 ? &data->as.list.items[0] : NULL;
    return first && first->kind == FSDP_VALUE_STRING && first->as.bytes.size == strlen("batches") &&
           memcmp(first->as.bytes.data, "batches", strlen("batches")) == 0;
}

static fsdp_status check_config(const train_job *job, const train_source *source, fsdp_error *err)
{
    const unsigned allowed = job->opts->allowed_changes;
    train_config before;
    if (source->train_config.size == 0)
        return FSDP_OK;
    FSDP_TRY(train_config_parse(&before, source->train_config.data, source->train_config.size,
                                "train.config", err));
    const bool has_given = job->opts->batches || was_given(source);
    if (!has_given && before.train.batch != job->config->train.batch &&
        !(allowed & TRAIN_CHANGE_BATCH))
        return fail_change(source, "train.batch", "batch", err);
    const char *key = train_config_find_change(&before, job->config, "optim.");
    if (key && !(allowed & TRAIN_CHANGE_OPTIM))
        return fail_change(source, key, "optim", err);
    return FSDP_OK;
}

static bool is_same_tokenizer(const train_job *job, const train_source *source)
{
    fsdp_text text = {0};
    add_tokenizer_text(job, &text);
    bool is_same =
        !text.failed && text.size == source->tokenizer_text.size &&
        (text.size == 0 || memcmp(text.data, source->tokenizer_text.data, text.size) == 0);
    fsdp_text_release(&text);
    return is_same;
}

/* All but the last item, which is how far the training came. */
static fsdp_status compare_data(const train_job *job, const train_source *source, bool *is_same_out,
                                fsdp_error *err)
{
    fsdp_value data = {0};
    FSDP_TRY(describe_data(job, &data, err));
    *is_same_out =
        source->data.kind == FSDP_VALUE_DICT && source->data.as.list.count == data.as.list.count;
    for (size_t i = 0; *is_same_out && i + 1 < data.as.list.count; i++)
        *is_same_out = fsdp_value_equal(&data.as.list.items[i], &source->data.as.list.items[i]);
    fsdp_value_release(&data);
    return FSDP_OK;
}

static int64_t consumed_in(const train_source *source)
{
    const fsdp_value *data = &source->data;
    size_t count = data->kind == FSDP_VALUE_DICT ? data->as.list.count : 0;
    const fsdp_value *last = count > 0 ? &data->as.list.items[count - 1] : NULL;
    return last && last->kind == FSDP_VALUE_I64 ? last->as.i64 : -1;
}

/* FSDP_ERR_DAMAGED names what differs from the checkpoint and is not in --allow-change. */
static fsdp_status check_state(const train_job *job, const train_source *source, fsdp_error *err)
{
    fsdp_world_mark(job->world, "compare");
    if (!is_same_tokenizer(job, source)) /* first: it also changes the model's vocabulary */
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "cannot resume from '%s': it was made with another tokenizer",
                         source->path);
    if (job->model_text.size != source->config_text.size ||
        memcmp(job->model_text.data, source->config_text.data, job->model_text.size) != 0)
        return fsdp_fail(
            err, FSDP_ERR_DAMAGED,
            "cannot resume from '%s': it holds another model than [model] or --init describe",
            source->path);
    bool is_same;
    FSDP_TRY(compare_data(job, source, &is_same, err));
    if (!is_same && !(job->opts->allowed_changes & TRAIN_CHANGE_DATA))
        return fail_change(source, "data", "data", err);
    return check_config(job, source, err);
}

static int64_t number_at(const fsdp_sd *sd, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, i);
    return entry->value.kind == FSDP_VALUE_I64 ? entry->value.as.i64 : -1;
}

/* Other data begins with its first sequence. */
static fsdp_status restart_changed_data(train_job *job, const train_source *source, fsdp_error *err)
{
    bool is_same;
    FSDP_TRY(compare_data(job, source, &is_same, err));
    if (!is_same)
        job->consumed = 0;
    return FSDP_OK;
}

static fsdp_status load(train_job *job, const train_source *source, fsdp_sd *counters,
                        fsdp_error *err)
{
    const fsdp_root_load_opts opts = {.extra = counters};
    FSDP_TRY(add_number(counters, "train.step", 0, err));
    FSDP_TRY(add_number(counters, "train.tokens", 0, err));
    FSDP_TRY(fsdp_root_load(job->root, source->path, &opts, err));
    job->step = number_at(counters, 0);
    job->tokens = number_at(counters, 1);
    job->consumed = consumed_in(source);
    if (job->opts->allowed_changes & TRAIN_CHANGE_DATA)
        FSDP_TRY(restart_changed_data(job, source, err));
    if (job->step < 0 || job->tokens < 0 || job->consumed < 0)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "cannot resume from '%s': its counters are not numbers", source->path);
    job->resumed = true;
    return FSDP_OK;
}

static fsdp_status load_checked(train_job *job, const train_source *source, fsdp_error *err)
{
    fsdp_sd *counters = NULL;
    FSDP_TRY(fsdp_ctl_agree(job->ctl, fsdp_sd_create(&counters, err), err));
    fsdp_status st = load(job, source, counters, err);
    fsdp_sd_free(counters);
    return st;
}

/* --- damaged checkpoints of a run ---------------------------------------------------------------- */

/* The run's next older checkpoint. */
static fsdp_status open_older(const char *run, train_source *source, bool *is_there_out,
                              fsdp_error *err)
{
    fsdp_run_steps steps;
    char path[PATH_MAX] = "";
    FSDP_TRY(fsdp_run_list(run, NULL, &steps, err));
    for (size_t i = 0; i < steps.count && !*path; i++)
        if (steps.items[i].state == FSDP_STEP_GOOD && steps.items[i].step < source->step)
            snprintf(path, sizeof path, "%s/%s", run, steps.items[i].name);
    fsdp_run_steps_release(&steps);
    *is_there_out = *path != '\0';
    if (!*path)
        return FSDP_OK;
    train_source_close(source);
    return train_source_open(path, source, err);
}

/* Steps after the loaded one are damaged; the training will save steps of their names again. */
static fsdp_status set_aside(const char *run, const char *name, train_log *log, fsdp_error *err)
{
    char from[PATH_MAX], to[PATH_MAX];
    int length = snprintf(from, sizeof from, "%s/%s", run, name);
    for (int i = 1; i < 1000 && length < (int)sizeof from; i++) {
        length = snprintf(to, sizeof to, "%s/damaged-%s.%d", run, name, i);
        if (length < (int)sizeof to && access(to, F_OK) != 0)
            break;
    }
    if (length >= (int)sizeof to)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", run);
    if (rename(from, to) != 0)
        return fsdp_fail_errno(err, errno, "cannot rename '%s', which is damaged", from);
    train_log_warn(log, "'%s' is damaged; it is now '%s'", from, to);
    return FSDP_OK;
}

static fsdp_status set_aside_newer(train_job *job, const char *run, fsdp_error *err)
{
    fsdp_run_steps steps;
    fsdp_status st = fsdp_run_list(run, NULL, &steps, err);
    for (size_t i = 0; st == FSDP_OK && i < steps.count; i++)
        if (steps.items[i].step > job->step &&
            (steps.items[i].state == FSDP_STEP_GOOD || steps.items[i].state == FSDP_STEP_BROKEN))
            st = set_aside(run, steps.items[i].name, &job->log, err);
    fsdp_run_steps_release(&steps);
    return st;
}

fsdp_status train_resume_from(train_job *job, train_source *source, fsdp_error *err)
{
    const bool is_auto = job->opts->resume == TRAIN_RESUME_AUTO;
    bool is_there = true;
    fsdp_status st = FSDP_ERR_DAMAGED;
    while (st == FSDP_ERR_DAMAGED && is_there) {
        fsdp_error other = {0};
        FSDP_TRY(fsdp_ctl_agree(job->ctl, check_state(job, source, err), err));
        st = load_checked(job, source, err);
        is_there = st == FSDP_ERR_DAMAGED && is_auto;
        if (!is_there)
            break;
        st =
            fsdp_ctl_agree(job->ctl, open_older(job->opts->run, source, &is_there, &other), &other);
        if (st != FSDP_OK) {
            *err = other;
            return st;
        }
        st = FSDP_ERR_DAMAGED;
    }
    if (st != FSDP_OK || !is_auto)
        return st;
    return fsdp_ctl_agree(
        job->ctl, job->rank == 0 ? set_aside_newer(job, job->opts->run, err) : FSDP_OK, err);
}

/* === saves ==================================================================================== */

/* A checkpoint that is there. */
typedef struct saved_step {
    int64_t step, bytes; /* bytes of this rank */
    double stall_ms, write_ms;
} saved_step;

/* --- another format ------------------------------------------------------------------------------ */

static const char *const formats[] = {NULL, "dcp", "hf"}; /* of save.also */

/* RUN/hf/N or RUN/dcp/N, by rank 0: a directory step-N is always a native checkpoint. Retention removes
 * copies with their steps. */
static fsdp_status convert(const train_job *job, int64_t step, fsdp_error *err)
{
    const char *format = formats[job->config->save.also], *run = job->opts->run;
    char from[PATH_MAX], folder[PATH_MAX], to[PATH_MAX];
    const fsdp_convert_opts opts = {
        .format = format, .overwrite = true, .memory = job->config->save.mem};
    snprintf(from, sizeof from, "%s/step-%08lld", run, (long long)step);
    snprintf(folder, sizeof folder, "%s/%s", run, format);
    if (snprintf(to, sizeof to, "%s/%s/%08lld", run, format, (long long)step) >= (int)sizeof to)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the path '%s' is too long", run);
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return fsdp_fail_errno(err, errno, "cannot create '%s'", folder);
    return fsdp_checkpoint_convert(from, to, &opts, err);
}

/* --- failures ------------------------------------------------------------------------------------ */

/* Failures of a disk, which may pass. */
static bool may_pass(fsdp_status status)
{
    return status == FSDP_ERR_NO_SPACE || status == FSDP_ERR_IO || status == FSDP_ERR_LIMIT;
}

static fsdp_status log_failure(train_job *job, int64_t step, const fsdp_error *why, fsdp_error *err)
{
    fsdp_text members = {0};
    if (job->rank != 0)
        return FSDP_OK;
    train_log_warn(&job->log, "step %lld is not saved: %s", (long long)step, why->text);
    fsdp_text_addf(&members, "\"failed\": %lld, \"error\": ", (long long)job->failed_saves);
    fsdp_text_add_json_string(&members, why->text, strlen(why->text));
    fsdp_status st = members.failed ? fsdp_fail(err, FSDP_ERR_LIMIT, "out of memory") : FSDP_OK;
    if (st == FSDP_OK)
        train_log_event(&job->log, "save", step, members.data);
    fsdp_text_release(&members);
    return st;
}

/* FSDP_OK: the failure is counted, and save.on_error says that the training continues. */
static fsdp_status take_failure(train_job *job, int64_t step, const fsdp_error *why,
                                fsdp_error *err)
{
    if (err)
        *err = *why;
    if (!may_pass(why->status) || job->config->save.on_error == TRAIN_ERROR_STOP)
        return why->status;
    job->failed_saves++;
    return fsdp_ctl_agree(job->ctl, log_failure(job, step, why, err), err);
}

/* --- one save ------------------------------------------------------------------------------------ */

/* async: returns once the state is copied; else when the checkpoint is there. */
static fsdp_status save(train_job *job, const fsdp_sd *values, bool async, fsdp_error *err)
{
    const train_config *config = job->config;
    const fsdp_retention retain = {.keep_last = (int)config->save.keep_last,
                                   .keep_every = config->save.keep_every};
    const fsdp_root_save_opts opts = {.save = {.step = &job->step,
                                               .compress = config->save.compress == TRAIN_ZSTD,
                                               .memory = config->save.mem,
                                               .retain = config->save.keep_last ? &retain : NULL},
                                      .into_run = true,
                                      .extra = values};
    return async ? fsdp_async_save(job->saver, job->opts->run, &opts, err)
                 : fsdp_root_save(job->root, job->opts->run, &opts, err);
}

static fsdp_status begin(train_job *job, bool async, fsdp_error *err)
{
    fsdp_sd *values = NULL;
    fsdp_status st = fsdp_sd_create(&values, err);
    if (st == FSDP_OK)
        st = add_state(job, values, err);
    st = fsdp_ctl_agree(job->ctl, st, err);
    if (st == FSDP_OK)
        st = save(job, values, async, err);
    fsdp_sd_free(values);
    return st;
}

/* Collective. A conversion that fails counts as a save that did. */
static fsdp_status convert_too(train_job *job, int64_t step, fsdp_error *err)
{
    enum { LONGEST_MS = 3600000 }; /* a large model takes longer than the deadline */
    fsdp_error why = {0};
    fsdp_status st = FSDP_OK;
    if (job->config->save.also == TRAIN_ALSO_NONE)
        return FSDP_OK;
    if (job->rank == 0) {
        fsdp_world_begin_busy(job->world, LONGEST_MS);
        st = convert(job, step, &why);
        fsdp_world_end_busy(job->world);
    }
    return fsdp_ctl_agree(job->ctl, st, &why) == FSDP_OK ? FSDP_OK
                                                         : take_failure(job, step, &why, err);
}

static fsdp_status end(train_job *job, const saved_step *saved, fsdp_error *err)
{
    char members[128];
    double bytes = (double)saved->bytes;
    FSDP_TRY(convert_too(job, saved->step, err));
    FSDP_TRY(fsdp_world_sum(job->world, &bytes, 1, err));
    snprintf(members, sizeof members, "\"stall_ms\": %.3f, \"write_ms\": %.3f, \"bytes\": %.0f",
             saved->stall_ms, saved->write_ms, bytes);
    train_log_event(&job->log, "save", saved->step, members);
    return FSDP_OK;
}

/* --- attempts ------------------------------------------------------------------------------------ */

/* Tries until the checkpoint is there. save.on_error may allow to continue without it, but not at the end. */
static fsdp_status save_now(train_job *job, bool is_last, fsdp_error *err)
{
    enum { RETRIES = 3 };
    const int on_error = job->config->save.on_error;
    const int retries = on_error == TRAIN_ERROR_RETRY ? RETRIES : 0;
    const fsdp_memory memory = fsdp_root_memory(job->root);
    const int64_t bytes = memory.now[FSDP_MEMORY_SHARD] + memory.now[FSDP_MEMORY_OPTIM];
    fsdp_error why = {0};
    for (int i = 0; i <= retries; i++) {
        double began = cli_now();
        why = (fsdp_error){0};
        if (begin(job, false, &why) == FSDP_OK) {
            double ms = (cli_now() - began) * 1e3;
            return end(job, &(saved_step){job->step, bytes, ms, ms}, err);
        }
        FSDP_TRY(take_failure(job, job->step, &why, err));
        if (i < retries)
            sleep(1u << i);
    }
    if (on_error == TRAIN_ERROR_CONTINUE && !is_last)
        return FSDP_OK;
    if (err)
        *err = why;
    return why.status;
}

/* --- saves in the background --------------------------------------------------------------------- */

fsdp_status train_save_finish(train_job *job, bool is_last, fsdp_error *err)
{
    fsdp_async_report report;
    fsdp_error why = {0};
    if (!job->is_saving)
        return FSDP_OK;
    job->is_saving = false;
    if (fsdp_async_save_wait(job->saver, &report, &why) == FSDP_OK)
        return end(job, &(saved_step){report.step, report.bytes, report.stall_ms, report.write_ms},
                   err);
    FSDP_TRY(take_failure(job, report.step, &why, err));
    if (job->config->save.on_error == TRAIN_ERROR_RETRY || is_last)
        return save_now(job, is_last, err);
    return FSDP_OK;
}

fsdp_status train_save(train_job *job, bool is_last, fsdp_error *err)
{
    const int64_t failed = job->failed_saves;
    const bool has_changed = job->has_changed;
    fsdp_error why = {0};
    job->has_changed = false;
    FSDP_TRY(train_save_finish(job, false, err));
    if (failed != job->failed_saves && job->config->save.on_error == TRAIN_ERROR_RETRY)
        return FSDP_OK; /* this step was saved in its place */
    /* the saver refuses a model that has the values of the save before */
    if (!job->saver || !has_changed)
        return save_now(job, is_last, err);
    if (begin(job, true, &why) != FSDP_OK) {
        FSDP_TRY(take_failure(job, job->step, &why, err));
        return save_now(job, is_last, err);
    }
    job->is_saving = true;
    return is_last ? train_save_finish(job, true, err) : FSDP_OK;
}
