/*
 * The model of a checkpoint under the names that a conversion to hf gives it: see hf_model.h. Selection and
 * names are those of a conversion; what hf cannot hold stays, since only names and shapes matter here.
 */
#include "statedict/expect/hf_model.h"

#include "statedict/select/model_part.h"
#include "statedict/select/relayout.h"
#include "statedict/select/selection.h"
#include <fsdp/run.h>

#include <string.h>

static bool holds_all(fsdp_dtype dtype)
{
    (void)dtype;
    return true;
}

static fsdp_status lay_out(fsdp_hf_model *model, const fsdp_selection *selection, fsdp_error *err)
{
    fsdp_mesh *one = NULL;
    FSDP_TRY(fsdp_mesh_create(1, (int64_t[]){1}, (const char *[]){"rank"}, NULL, &one, err));
    const fsdp_relayout_opts opts = {.kind = FSDP_FULL, .mesh = one};
    fsdp_status st = fsdp_relayout(model->checkpoint->manifest.sd, &opts, selection, &model->sd,
                                   &model->source, err);
    fsdp_mesh_free(one);
    return st;
}

static fsdp_status select_with(fsdp_hf_model *model, fsdp_names_known known, const fsdp_text *rules,
                               size_t count, fsdp_error *err)
{
    const fsdp_format hf = {.name = "hf",
                            .caps = {.model_part = true, .for_loaders = true},
                            .writer = &(const fsdp_format_writer){.holds_dtype = holds_all}};
    const fsdp_select_from from = {model->checkpoint->manifest.sd, model->checkpoint->is_missing,
                                   known, true};
    fsdp_selection *selection = NULL;
    const char **list = fsdp_alloc(count + 1, sizeof *list), *at = rules->data;
    if (!list)
        return fsdp_fail_memory(err, "rules of names");
    for (size_t i = 0; i < count; i++, at += strlen(at) + 1)
        list[i] = at;
    const fsdp_select_opts opts = {.only = FSDP_ONLY_MODEL, .renames = list, .rename_count = count};
    fsdp_status st = fsdp_selection_create(&from, &opts, &hf, &selection, err);
    if (st == FSDP_DIFFERS)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "'%s' has no tensors of a model", model->path);
    if (st == FSDP_OK)
        st = lay_out(model, selection, err);
    fsdp_selection_free(selection);
    fsdp_free(list);
    return st;
}

fsdp_status fsdp_hf_model_open(const fsdp_hf_model_from *from, const fsdp_verify_opts *opts,
                               fsdp_hf_model *model, fsdp_error *err)
{
    const fsdp_open_opts open = {.allow_missing = from->allow_missing, .access = opts->access};
    FSDP_TRY(fsdp_checkpoint_resolve(from->path, &open, &opts->watch, &model->path, err));
    FSDP_TRY(fsdp_checkpoint_open(model->path, &open, &model->checkpoint, err));
    return fsdp_hf_model_select(model, from->model_type, NULL, err);
}

/* "s/^model\.//", with a zero behind it. */
static void add_below(const char *below, fsdp_text *rules, size_t *count)
{
    fsdp_text_addf(rules, "s/^");
    for (const char *at = below; *at; at++)
        fsdp_text_addf(rules, *at == '.' ? "\\." : "%c", *at);
    fsdp_text_add(rules, "//", 3);
    (*count)++;
}

fsdp_status fsdp_hf_model_select(fsdp_hf_model *model, const char *model_type, const char *below,
                                 fsdp_error *err)
{
    fsdp_parts parts;
    fsdp_text rules = {0};
    size_t count = 0;
    bool is_known = model_type && model_type[0];
    const char *format = fsdp_checkpoint_describe(model->checkpoint)->format;
    const fsdp_names_known known = {.paths = model->checkpoint->source != NULL,
                                    .only_tensors = fsdp_format_from(format)->caps.only_tensors,
                                    .model_type = is_known ? model_type : NULL};
    FSDP_TRY(fsdp_parts_find(model->checkpoint->manifest.sd, known, NULL, &parts, err));
    fsdp_status st = fsdp_parts_add_rules(&parts, &rules, &count, err);
    if (below)
        add_below(below, &rules, &count);
    if (rules.failed)
        st = fsdp_fail_memory(err, "rules of names");
    if (st == FSDP_OK)
        st = select_with(model, known, &rules, count, err);
    fsdp_text_release(&rules);
    return st;
}

void fsdp_hf_model_release(fsdp_hf_model *model)
{
    fsdp_sd_free(model->sd);
    fsdp_free(model->source);
    fsdp_free(model->one);
    fsdp_free(model->digests);
    fsdp_checkpoint_close(model->checkpoint);
    fsdp_string_free(model->path);
    *model = (fsdp_hf_model){0};
}
