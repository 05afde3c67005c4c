/*
 * Chooses what a conversion moves: opens the source, puts the stages of derived tensors on it, finds names
 * for loaders and names of one tensor, and describes the target. Writes nothing. See convert_job.h.
 */
#include "base/data/flow.h"
#include "base/text.h"
#include "formats/source.h"
#include "kernels/quants.h"
#include "statedict/checkpoint/same_tensors.h"
#include "statedict/convert/convert_job.h"
#include "statedict/derive/adapter.h"
#include "statedict/derive/numbered_optim.h"
#include "statedict/derive/element_types.h"
#include "statedict/derive/tied_names.h"
#include "statedict/expect/hf_model.h"
#include "statedict/run/hub_cache.h"
#include "statedict/run/remote_path.h"
#include "statedict/select/drop_rules.h"
#include "statedict/select/model_part.h"
#include "statedict/select/optim_form.h"
#include "statedict/select/relayout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* === opening the source ======================================================================= */

/* True when the format or the selection takes more than the model: then a directory of parts is read as
 * fsdp_open_opts.whole has it. */
static bool takes_whole(const fsdp_convert_opts *opts)
{
    const fsdp_format *target = opts->format ? fsdp_format_to(opts->format) : NULL;
    bool is_model = target && target->caps.model_only;
    return opts->select.only == FSDP_ONLY_DEFAULT ? !is_model && !opts->select.part
                                                  : opts->select.only != FSDP_ONLY_MODEL;
}

/* Opens the source of a conversion with the options' format and limits. */
static fsdp_status open_source(const char *from, const fsdp_convert_opts *opts,
                               fsdp_checkpoint **checkpoint_out, fsdp_error *err)
{
    if (opts->state)
        return fsdp_checkpoint_of_state(fsdp_access_io(&opts->open.access), opts->state,
                                        checkpoint_out, err);
    fsdp_open_opts open = opts->open;
    open.whole = takes_whole(opts);
    open.memory = opts->memory;
    open.watch = &opts->watch;
    FSDP_TRY(fsdp_checkpoint_open(from, &open, checkpoint_out, err));
    bool is_empty = fsdp_sd_count((*checkpoint_out)->manifest.sd) == 0;
    if (!is_empty || fsdp_checkpoint_missing_count(*checkpoint_out) == 0)
        return FSDP_OK;
    fsdp_checkpoint_close(*checkpoint_out);
    *checkpoint_out = NULL;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "all files of '%s' that hold data are missing", from);
}

/* === names for loaders ======================================================================== */

/*
 * Names for loaders: what programs put around the names of a model (the key above it, elements of wrappers)
 * is stripped for targets that hold a model. The stripping is a list of rename rules, so that plans and
 * fsdp-diff know it. With a config.json, the result must have the tensors of its model.
 */

static fsdp_status take_rules(convert_job *job, size_t count, fsdp_error *err)
{
    const char *at = job->rules.data;
    job->rule_list = fsdp_alloc(count, sizeof *job->rule_list);
    if (!job->rule_list)
        return fsdp_fail_memory(err, "rules of names");
    for (size_t i = 0; i < count; i++, at += strlen(at) + 1)
        job->rule_list[i] = at;
    job->opts.select.renames = job->rule_list;
    job->opts.select.rename_count = count;
    return FSDP_OK;
}

/* Sets opts.select.renames for a target that holds a model, unless names are to be kept. */
static fsdp_status fit_names(convert_job *job, fsdp_error *err)
{
    const fsdp_select_opts *select = &job->opts.select;
    fsdp_parts parts;
    size_t count = 0;
    bool is_plain = job->format->caps.plain_names;
    bool is_model = job->format->caps.model_part &&
                    (select->only == FSDP_ONLY_DEFAULT || select->only == FSDP_ONLY_MODEL);
    job->known.paths = job->from->source != NULL;
    job->known.only_tensors =
        fsdp_format_from(fsdp_checkpoint_describe(job->from)->format)->caps.only_tensors;
    if ((is_model || is_plain) && !job->known.paths && job->config.kind.type[0])
        job->known.model_type = job->config.kind.type;
    bool is_named = is_plain || (is_model && job->format->caps.for_loaders);
    if (!is_named || select->keep_names || select->rename_count > 0)
        return FSDP_OK;
    FSDP_TRY(fsdp_parts_find(job->from->manifest.sd, job->known, select->part, &parts, err));
    FSDP_TRY(fsdp_parts_add_rules(&parts, &job->rules, &count, err));
    if (is_plain)
        FSDP_TRY(fsdp_parts_add_optim_rule(&parts, &job->rules, &count, err));
    return count > 0 ? take_rules(job, count, err) : FSDP_OK;
}

/* --- the names that the config asks for --------------------------------------------------------- */

static bool drops_tensors(const fsdp_select_opts *select)
{
    for (size_t i = 0; i < select->drop_count; i++) {
        const char *drop = select->drops[i];
        if (strcmp(drop, "values") != 0 && strcmp(drop, "opaque") != 0 &&
            strcmp(drop, "optim") != 0 && !fsdp_drop_is_of_metadata(drop))
            return true;
    }
    return false;
}

/* An adapter has no tensor of the model that a config beside it may describe. It is known by the name of its
 * file, or by its tensors. */
static bool is_adapter(const fsdp_checkpoint *from, const fsdp_sd *sd)
{
    const fsdp_source *source = from->source;
    const char *path = source && fsdp_source_file_count(source) > 0
                           ? fsdp_source_file_path(source, 0)
                           : from->path;
    const char *slash = strrchr(path, '/');
    if (strncmp(slash ? slash + 1 : path, "adapter", 7) == 0)
        return true;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        if (entry->kind != FSDP_ENTRY_VALUE && !memmem(entry->name, entry->name_size, ".lora_", 6))
            return false;
    }
    return true;
}

/* True when the person asked for the whole model. */
static bool asks_for_model(const convert_job *job)
{
    const fsdp_select_opts *select = &job->opts.select;
    return !select->include && !select->exclude && !select->part && !select->keep_names &&
           select->only != FSDP_ONLY_OPTIM && !drops_tensors(select);
}

/* The model of the checkpoint beside the check's config, with names below a further one. */
static fsdp_status see_below(convert_job *job, fsdp_export_check *check,
                             fsdp_checkpoint *checkpoint, const char *below, fsdp_error *err)
{
    fsdp_hf_model model = {.checkpoint = checkpoint, .path = checkpoint->path};
    fsdp_export_report_release(&job->seen);
    fsdp_status st = fsdp_hf_model_select(&model, NULL, below, err);
    check->sd = model.sd;
    if (st == FSDP_OK)
        st = fsdp_export_compare(check, &job->seen, err);
    model.checkpoint = NULL; /* it stays the caller's */
    model.path = NULL;
    fsdp_hf_model_release(&model);
    return st;
}

/* The comparison for targets of other names: before a map renames the model. For fsdp_map_request; context is
 * the job, which keeps the report for check_names. */
static fsdp_status see_model(void *context, const fsdp_map_request *request,
                             fsdp_checkpoint *checkpoint, const char *below, fsdp_error *err)
{
    convert_job *job = context;
    const fsdp_config_file *config = request->config;
    fsdp_export_check check = {.config = config,
                               .is_dequantized = job->opts.dequant != NULL,
                               .from = checkpoint->path,
                               .allow_missing = job->opts.open.allow_missing,
                               .may_be_unnamed = below != NULL};
    bool is_checked_later = job->format->caps.for_loaders;
    if (!config || is_checked_later || !asks_for_model(job) ||
        is_adapter(checkpoint, checkpoint->manifest.sd))
        return FSDP_OK;
    fsdp_status st = see_below(job, &check, checkpoint, NULL, err);
    check.may_be_unnamed = false;
    if (st == FSDP_OK && !job->seen.model[0] && below)
        st = see_below(job, &check, checkpoint, below, err);
    return st;
}

/* A file of safetensors has no config next to it; one next to a directory of weights says what it holds. */
static const fsdp_config_file *find_copied_config(const convert_job *job)
{
    fsdp_file_info info;
    const fsdp_convert_opts *opts = &job->opts;
    bool has_own_names = opts->select.rename_count == 0 && !opts->map;
    if (job->format->caps.for_loaders)
        return job->copies.config;
    return has_own_names && job->format->caps.checks_config && job->from->source &&
                   job->io->ops->info(job->io, job->from->path, &info) >= 0 &&
                   info.kind == FSDP_FILE_DIRECTORY && job->config.path
               ? &job->config
               : NULL;
}

/* Compares a model with the config.json that is copied beside it (export_check.h), once its description was
 * made; nothing when only a part is asked for. The caller releases the report. */
static fsdp_status check_names(convert_job *job, fsdp_export_report *report_out, fsdp_error *err)
{
    const bool is_copied = job->format->caps.for_loaders;
    fsdp_export_check check = {.config = find_copied_config(job),
                               .is_dequantized = is_copied && job->opts.dequant,
                               .is_untied = is_copied && job->copies.unties,
                               .weights = job->opts.copy_from,
                               .access = job->opts.open.access,
                               .memory =
                                   job->opts.memory > 0 ? job->opts.memory : FSDP_MEMORY_DEFAULT,
                               .from = job->from->path,
                               .sd = job->sd,
                               .allow_missing = job->opts.open.allow_missing,
                               .ties = job->ties.items,
                               .tie_count = job->ties.count,
                               .is_copied = is_copied,
                               .may_be_unnamed = !is_copied};
    *report_out = job->seen;
    job->seen = (fsdp_export_report){0};
    bool is_whole = asks_for_model(job) && job->opts.select.only != FSDP_ONLY_ALL;
    if (report_out->model[0] || !is_whole || !check.config || is_adapter(job->from, job->sd))
        return FSDP_OK;
    return fsdp_export_compare(&check, report_out, err);
}

/* === stages of derived tensors ================================================================ */

/*
 * The stages between the opened source and the entries that a conversion selects: each replaces a checkpoint
 * by one of derived tensors, which are computed from the other's while they are read. Their order is that of
 * the table below; the plan lists those that changed something.
 */

/* The stages share what they find about the model. */
typedef struct convert_stages {
    convert_job *job;
    const fsdp_config_file *config; /* NULL: there is none */
    fsdp_map_request request;
    fsdp_map_sides sides;
    size_t
        own_entries; /* those that the map leaves, in front of those that only the target needs */
} convert_stages;

/* Replaces *from if there is something to do, and then sets the text that the plan has for it. *from is
 * closed and NULL after most failures. */
typedef fsdp_status (*convert_stage_run)(convert_stages *stages, fsdp_checkpoint **from,
                                         char text[FSDP_STAGE_TEXT], fsdp_error *err);

static const char *ending(int64_t count)
{
    return count == 1 ? "" : "s";
}

/* Numbers of an optimizer become names, where the target's loaders ask for these. Other formats have numbers
 * because a program wanted them; so may one file of torch.save, without a config.json. */
static fsdp_status name_optim(convert_stages *stages, fsdp_checkpoint **from,
                              char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const convert_job *job = stages->job;
    (void)text; /* the note on the optimizer's form says it */
    const fsdp_caps source = fsdp_format_from(fsdp_checkpoint_describe(*from)->format)->caps;
    if (!job->format->caps.names_groups || job->opts.select.keep_names ||
        job->opts.select.only == FSDP_ONLY_MODEL || !source.numbered)
        return FSDP_OK;
    const fsdp_numbered_opts opts = {
        .known = {.paths = true,
                  .model_type = job->config.kind.type[0] ? job->config.kind.type : NULL},
        .keeps_order = source.keeps_order,
        .may_stay = source.keeps_order && !stages->config};
    return fsdp_name_numbered(&opts, from, &stages->job->facts.optim_named, err);
}

static fsdp_status merge_adapter(convert_stages *stages, fsdp_checkpoint **from,
                                 char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    convert_job *job = stages->job;
    fsdp_adapter_report report = {0};
    if (!job->opts.adapter)
        return FSDP_OK;
    const fsdp_adapter_opts opts = {
        .path = job->opts.adapter, .access = &job->opts.open.access, .watch = &job->opts.watch};
    FSDP_TRY(fsdp_adapter_merge(&opts, from, &report, err));
    job->unties = report.unties;
    snprintf(text, FSDP_STAGE_TEXT,
             "merge the adapter into %" PRId64 " tensor%s, %" PRId64 " replaced", report.merged,
             ending(report.merged), report.replaced);
    return FSDP_OK;
}

static fsdp_status dequantize(convert_stages *stages, fsdp_checkpoint **from,
                              char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const char *dtype = stages->job->opts.dequant;
    fsdp_dequant_opts opts = {.config = stages->config};
    fsdp_dequant_report report = {0};
    if (!dtype)
        return FSDP_OK;
    opts.dtype = fsdp_dtype_from_typed(dtype, strlen(dtype));
    if (opts.dtype != FSDP_F32 && opts.dtype != FSDP_BF16 && opts.dtype != FSDP_F16)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "weights are dequantized to f32, bf16 or f16, not to '%s'", dtype);
    FSDP_TRY(fsdp_dequantize(&opts, from, &report, err));
    snprintf(text, FSDP_STAGE_TEXT,
             "dequantize %" PRId64 " weight%s to %s, without %" PRId64 " scales", report.weights,
             ending(report.weights), dtype, report.scales);
    return FSDP_OK;
}

/* Decodes blocks that the target cannot hold, widens vectors that it wants in f32, and makes the blocks of
 * `types`. */
static fsdp_status fit_types(convert_stages *stages, const fsdp_target_types *types,
                             fsdp_checkpoint **from, char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const convert_job *job = stages->job;
    fsdp_type_report report = {0};
    FSDP_TRY(fsdp_derive_target_types(types, from, &report, err));
    stages->job->facts.encoded += report.encoded;
    const char *between = "";
    size_t size = 0;
    if (report.decoded > 0) {
        size += (size_t)snprintf(text, FSDP_STAGE_TEXT,
                                 "decode %" PRId64 " quantized tensor%s to f32: %s holds no blocks",
                                 report.decoded, ending(report.decoded), job->opts.format);
        between = "; ";
    }
    if (report.encoded > 0) {
        size += (size_t)snprintf(text + size, FSDP_STAGE_TEXT - size,
                                 "%sencode %" PRId64 " tensor%s as %s", between, report.encoded,
                                 ending(report.encoded), job->opts.select.dtype);
        between = "; ";
    }
    if (report.widened > 0)
        snprintf(text + size, FSDP_STAGE_TEXT - size, "%scast %" PRId64 " tensor%s to f32", between,
                 report.widened, ending(report.widened));
    return FSDP_OK;
}

static fsdp_status decode_blocks(convert_stages *stages, fsdp_checkpoint **from,
                                 char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const fsdp_target_types types = {.target = stages->job->format};
    return fit_types(stages, &types, from, text, err);
}

/* Returns the type of blocks that --dtype names ("q8_0"); NONE: --dtype casts elements, if anything. */
static fsdp_dtype blocks_of(const char *dtype)
{
    fsdp_dtype named = dtype ? fsdp_dtype_from_typed(dtype, strlen(dtype)) : FSDP_DTYPE_NONE;
    const fsdp_dtype_info *info = fsdp_dtype_describe(named);
    return info && info->values > 1 ? named : FSDP_DTYPE_NONE;
}

/* A map takes and joins plain elements, so that blocks are made after it. */
static fsdp_status encode_blocks(convert_stages *stages, fsdp_checkpoint **from,
                                 char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const convert_job *job = stages->job;
    const char *dtype = job->opts.select.dtype;
    fsdp_dtype blocks = blocks_of(dtype);
    if (blocks && !fsdp_blocks_can_encode(blocks))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "cannot make blocks of %s: they can only be read and copied; use q8_0 or q4_0, or make "
            "them with llama-quantize of llama.cpp from a GGUF file in bf16",
            dtype);
    if (blocks && !job->format->writer->holds_dtype(blocks))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s cannot hold blocks of %s; use --to gguf",
                         job->format->name, dtype);
    fsdp_select_opts rules = job->opts.select;
    fsdp_cast_rules *casts = NULL;
    rules.dtype = NULL;
    FSDP_TRY(fsdp_cast_rules_create(&rules, &casts, err));
    const fsdp_target_types types = {job->format, blocks, casts};
    fsdp_status st = fit_types(stages, &types, from, text, err);
    fsdp_cast_rules_free(casts);
    return st;
}

/* The loader of a framework may ask for more than the format that the user names: Megatron's files beside
 * those of DCP. */
static void fit_format(convert_job *job, const char *layout)
{
    const fsdp_format *format = fsdp_format_for(job->format, layout);
    if (format != job->format)
        job->opts.format = format->name;
    job->format = job->place.format = format;
}

/* The source under the names of another framework, if a map is named or needed. */
static fsdp_status rename_by_map(convert_stages *stages, fsdp_checkpoint **from,
                                 char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    convert_job *job = stages->job;
    fsdp_plan_facts *facts = &job->facts;
    const fsdp_map_sides *sides = &stages->sides;
    FSDP_TRY(fsdp_map_rename(&stages->request, from, &stages->sides, err));
    stages->own_entries = fsdp_sd_count((*from)->manifest.sd);
    facts->is_mapped = sides->is_used;
    snprintf(facts->map, sizeof facts->map, "%s", sides->name);
    snprintf(facts->map_from, sizeof facts->map_from, "%s", sides->from);
    snprintf(facts->map_to, sizeof facts->map_to, "%s", sides->to);
    if (!sides->is_used)
        return FSDP_OK;
    if (sides->from[0] && sides->to[0])
        snprintf(text, FSDP_STAGE_TEXT, "names of %s become those of %s (--map %s)", sides->from,
                 sides->to, sides->name);
    else
        snprintf(text, FSDP_STAGE_TEXT, "names become those of the map '%s'", sides->name);
    fit_format(job, sides->to);
    return FSDP_OK;
}

static void count_target_entries(convert_stages *stages, const fsdp_checkpoint *from)
{
    stages->job->target_entries = fsdp_sd_count(from->manifest.sd) - stages->own_entries;
}

static fsdp_status add_gguf_pairs(convert_stages *stages, fsdp_checkpoint **from,
                                  char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const fsdp_select_opts *select = &stages->job->opts.select;
    fsdp_dtype matrices = select->dtype
                              ? fsdp_dtype_from_typed(select->dtype, strlen(select->dtype))
                              : FSDP_DTYPE_NONE;
    fsdp_gguf_found tokenizer = FSDP_GGUF_TOKENIZER;
    (void)text;
    if (!stages->sides.needs_pairs)
        return FSDP_OK;
    FSDP_TRY(fsdp_map_add_gguf_pairs(&stages->request, matrices, from, &tokenizer, err));
    stages->job->facts.lacks_tokenizer = tokenizer != FSDP_GGUF_TOKENIZER;
    stages->job->facts.has_tiktoken = tokenizer == FSDP_GGUF_TIKTOKEN;
    count_target_entries(stages, *from);
    return FSDP_OK;
}

static fsdp_status add_megatron_objects(convert_stages *stages, fsdp_checkpoint **from,
                                        char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const convert_job *job = stages->job;
    (void)text;
    if (!stages->sides.is_used || !job->format->caps.adds_objects)
        return FSDP_OK;
    FSDP_TRY(fsdp_map_add_megatron_objects(from, err));
    count_target_entries(stages, *from);
    return FSDP_OK;
}

/* A model has all names of a tied tensor, and its files one of them. The plan names those that are added. */
static fsdp_status add_tied_names(convert_stages *stages, fsdp_checkpoint **from,
                                  char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    convert_job *job = stages->job;
    (void)text;
    if (!job->format->caps.all_names || !stages->config || job->unties ||
        job->opts.tied != FSDP_TIED_KEEP || fsdp_config_check(stages->config, NULL) != FSDP_OK)
        return FSDP_OK;
    const fsdp_tied_model model = {.class_name = job->config.kind.class_name,
                                   .says = fsdp_config_says_tied(stages->config)};
    return fsdp_add_tied_names(&model, from, &job->added, err);
}

static const struct {
    const char *name;
    convert_stage_run run;
} table[] = {
    {"name_optimizer", name_optim},     {"adapter", merge_adapter},     {"dequant", dequantize},
    {"decode", decode_blocks},          {"map", rename_by_map},         {"gguf", add_gguf_pairs},
    {"megatron", add_megatron_objects}, {"tied_names", add_tied_names}, {"encode", encode_blocks},
};
_Static_assert(sizeof table / sizeof *table == FSDP_STAGES, "the plan has a place for each stage");

static fsdp_status run_stages(convert_stages *stages, fsdp_checkpoint **from, fsdp_error *err)
{
    fsdp_plan_facts *facts = &stages->job->facts;
    for (int i = 0; i < FSDP_STAGES; i++) {
        const fsdp_checkpoint *before = *from;
        fsdp_convert_stage *stage = &facts->stages[facts->stage_count];
        *stage = (fsdp_convert_stage){.name = table[i].name};
        FSDP_TRY(table[i].run(stages, from, stage->text, err));
        if (*from != before)
            facts->stage_count++;
    }
    return FSDP_OK;
}

/* A source without a config.json may have its numbers elsewhere. */
static fsdp_status find_config(convert_stages *stages, const fsdp_checkpoint *from, fsdp_error *err)
{
    convert_job *job = stages->job;
    fsdp_error why = {0};
    fsdp_config_find(job->io, job->opts.copy_from, from->path, &job->config, &why);
    if (why.status != FSDP_OK &&
        why.status != FSDP_ERR_NOT_FOUND) { /* it says what the tensors are */
        if (err)
            *err = why;
        return why.status;
    }
    const fsdp_map_request request = {.io = job->io, .opts = &job->opts, .target = job->format};
    if (!job->config.text && job->config.error.status == FSDP_OK)
        FSDP_TRY(fsdp_map_make_config(&request, from, &job->config, err));
    /* One that is not JSON is no reason to refuse the weights: nothing is known then. */
    if (job->config.error.status == FSDP_ERR_LIMIT)
        return fsdp_config_check(&job->config, err);
    stages->config = job->config.text ? &job->config : NULL;
    return FSDP_OK;
}

/* Puts the stages of derived tensors that the options ask for on the opened source, and
 * sets from to the last one's, which owns the others. from is NULL when a stage that failed has closed it. */
static fsdp_status derive_source(convert_job *job, fsdp_checkpoint *source, fsdp_error *err)
{
    convert_stages stages = {.job = job};
    fsdp_checkpoint *from = source;
    fsdp_status st = find_config(&stages, from, err);
    stages.request = (fsdp_map_request){.io = job->io,
                                        .opts = &job->opts,
                                        .config = stages.config,
                                        .target = job->format,
                                        .see_model = see_model,
                                        .context = job};
    if (st == FSDP_OK)
        st = run_stages(&stages, &from, err);
    job->from = from;
    return st;
}

/* === tied weights ============================================================================= */

/* Several names of one tensor: finds them, chooses the name that stays, and leaves out the others (--tied).
 * docs/formats.md, "Tied weights". */

enum { PAIRS_MOST = 16, COMPARED_BYTES = 1 << 20 };

/* --- the name that stays ----------------------------------------------------------------------- */

/* Smaller is better: embeddings, others, heads; then in the order of bytes. */
static int preference(const fsdp_selected *selected)
{
    return fsdp_name_is_embedding(selected->name, selected->name_size) ? 0
           : fsdp_name_is_head(selected->name, selected->name_size)    ? 2
                                                                       : 1;
}

static bool is_better(const fsdp_selected *a, const fsdp_selected *b)
{
    int x = preference(a), y = preference(b);
    if (x != y)
        return x < y;
    size_t size = a->name_size < b->name_size ? a->name_size : b->name_size;
    int order = size > 0 ? memcmp(a->name, b->name, size) : 0;
    return order != 0 ? order < 0 : a->name_size < b->name_size;
}

/* --- finding ties ----------------------------------------------------------------------------- */

typedef struct tie_rules {
    const fsdp_convert_opts *opts;
    const fsdp_format *target;
    int config;             /* tie_word_embeddings of config.json: 1, 0, or -1: missing */
    const char *class_name; /* of the model, whose tied names are known by it; or "" */
    const char *to;         /* spool files go beside this path */
} tie_rules;

typedef struct tie_search {
    fsdp_checkpoint *from;
    const tie_rules *rules;
    fsdp_selection *selection;
    size_t count;     /* of entries */
    size_t *one;      /* per entry: the entry that represents its tensor */
    bool *is_further; /* per entry: transformers saves the tensor under another name */
} tie_search;

/* --- equal bytes ------------------------------------------------------------------------------ */

typedef struct comparison {
    fsdp_checkpoint *checkpoint;
    size_t a, b; /* tensors */
    char *data;  /* room for a slab of each */
    fsdp_reader reader;
} comparison;

static fsdp_status compare_bytes(comparison *work, bool *equal_out, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(work->checkpoint->manifest.sd, work->a);
    int64_t size = (int64_t)fsdp_dtype_size(entry->dtype);
    char *other = work->data + COMPARED_BYTES;
    fsdp_slabs slabs = {0};
    fsdp_box slab;
    *equal_out = true;
    while (*equal_out &&
           fsdp_slabs_next(&slabs, entry->ndim, entry->shape, COMPARED_BYTES / size, &slab)) {
        fsdp_read_target first = {.box = slab, .dtype = entry->dtype, .data = work->data},
                         second = {.box = slab, .dtype = entry->dtype, .data = other};
        fsdp_read_request requests[] = {{work->a, &first, 1, &work->reader, NULL},
                                        {work->b, &second, 1, &work->reader, NULL}};
        FSDP_TRY(fsdp_checkpoint_get(work->checkpoint, &requests[0], err));
        FSDP_TRY(fsdp_checkpoint_get(work->checkpoint, &requests[1], err));
        *equal_out = memcmp(work->data, other, (size_t)(fsdp_box_count(&slab) * size)) == 0;
    }
    return FSDP_OK;
}

/* Opens the source a second time, because reading packed bytes here would change how the conversion reads.
 * Derived tensors are only in the checkpoint that is open. */
static fsdp_status are_equal(const tie_search *search, size_t a, size_t b, bool *equal_out,
                             fsdp_error *err)
{
    const fsdp_convert_opts *opts = search->rules->opts;
    bool is_derived = search->from->is_derived;
    comparison work = {.checkpoint = search->from, .a = a, .b = b};
    if (!is_derived)
        FSDP_TRY(open_source(search->from->path, opts, &work.checkpoint, err));
    work.data = fsdp_alloc_pages(2 * COMPARED_BYTES);
    fsdp_status st = work.data ? FSDP_OK : fsdp_fail_memory(err, "tied weights");
    if (st == FSDP_OK)
        st = fsdp_checkpoint_set_memory(work.checkpoint, opts->memory, search->rules->to, err);
    if (st == FSDP_OK)
        st = compare_bytes(&work, equal_out, err);
    fsdp_reader_release(&work.reader);
    fsdp_free(work.data);
    if (!is_derived)
        fsdp_checkpoint_close(work.checkpoint);
    return st;
}

static bool is_kept(const tie_search *search, size_t i, bool (*is_named)(const char *, size_t))
{
    const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
    return selected->is_kept && is_named(selected->name, selected->name_size) &&
           fsdp_sd_at(search->from->manifest.sd, i)->kind != FSDP_ENTRY_VALUE;
}

static bool may_be_equal(const tie_search *search, size_t a, size_t b)
{
    const fsdp_entry *x = fsdp_sd_at(search->from->manifest.sd, search->one[a]);
    const fsdp_entry *y = fsdp_sd_at(search->from->manifest.sd, search->one[b]);
    return search->one[a] != search->one[b] && x->dtype == y->dtype && x->ndim == y->ndim &&
           fsdp_entry_bytes(x) > 0 &&
           memcmp(x->shape, y->shape, (size_t)x->ndim * sizeof *x->shape) == 0;
}

static void unite(tie_search *search, size_t a, size_t b)
{
    size_t from = search->one[b];
    for (size_t i = 0; i < search->count; i++)
        if (search->one[i] == from)
            search->one[i] = search->one[a];
}

static fsdp_status find_equal(tie_search *search, fsdp_error *err)
{
    int pairs = 0;
    for (size_t a = 0; a < search->count; a++) {
        if (!is_kept(search, a, fsdp_name_is_head))
            continue;
        for (size_t b = 0; b < search->count; b++) {
            bool equal = false;
            if (!is_kept(search, b, fsdp_name_is_embedding) || !may_be_equal(search, a, b) ||
                pairs++ >= PAIRS_MOST)
                continue;
            FSDP_TRY(are_equal(search, search->one[a], search->one[b], &equal, err));
            if (equal)
                unite(search, a, b);
        }
    }
    return FSDP_OK;
}

static int64_t find_kept(const tie_search *search, const char *name, size_t size)
{
    for (size_t i = 0; i < search->count; i++) {
        const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
        if (selected->is_kept && selected->name_size == size &&
            memcmp(selected->name, name, size) == 0)
            return fsdp_sd_at(search->from->manifest.sd, i)->kind == FSDP_ENTRY_VALUE ? -1
                                                                                      : (int64_t)i;
    }
    return -1;
}

/* Names that the class of the model ties. */
static fsdp_status find_pairs(tie_search *search, fsdp_error *err)
{
    const fsdp_tied_model model = {.class_name = search->rules->class_name, .says = 1};
    fsdp_tied_pair pair;
    for (size_t i = 0; fsdp_tied_pair_at(&model, i, &pair); i++) {
        int64_t a = find_kept(search, pair.other, pair.other_size);
        int64_t b = find_kept(search, pair.name, pair.name_size);
        if (a < 0 || b < 0)
            continue;
        bool equal = search->one[a] == search->one[b];
        if (may_be_equal(search, (size_t)a, (size_t)b))
            FSDP_TRY(are_equal(search, search->one[a], search->one[b], &equal, err));
        if (equal)
            unite(search, (size_t)a, (size_t)b);
        search->is_further[b] = equal;
    }
    return FSDP_OK;
}

/* --- leaving out ------------------------------------------------------------------------------ */

static fsdp_status add_tie(fsdp_ties *ties, const fsdp_selected *dropped, const fsdp_selected *kept,
                           fsdp_error *err)
{
    fsdp_convert_tie tie = {.dropped =
                                fsdp_arena_strndup(&ties->arena, dropped->name, dropped->name_size),
                            .dropped_size = dropped->name_size,
                            .kept = fsdp_arena_strndup(&ties->arena, kept->name, kept->name_size),
                            .kept_size = kept->name_size};
    if (!tie.dropped || !tie.kept ||
        !fsdp_grow(&ties->items, &ties->room, ties->count + 1, sizeof *ties->items))
        return fsdp_fail_memory(err, "tied weights");
    ties->items[ties->count++] = tie;
    return FSDP_OK;
}

static bool can_be_noted(const fsdp_format *target, const fsdp_selected *dropped,
                         const fsdp_selected *kept)
{
    return !target->caps.notes_ties || target->writer->notes_tie(dropped->name, dropped->name_size,
                                                                 kept->name, kept->name_size);
}

/* True when entry a is the name to keep of the two. */
static bool is_better_entry(const tie_search *search, size_t a, size_t b)
{
    return search->is_further[a] != search->is_further[b]
               ? search->is_further[b]
               : is_better(fsdp_selection_at(search->selection, a),
                           fsdp_selection_at(search->selection, b));
}

static fsdp_status leave_out(tie_search *search, fsdp_ties *ties, fsdp_error *err)
{
    size_t *best = fsdp_alloc(search->count, sizeof *best); /* per representative, counted from 1 */
    fsdp_status st = best ? FSDP_OK : fsdp_fail_memory(err, "tied weights");
    for (size_t i = 0; i < search->count && st == FSDP_OK; i++) {
        const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
        size_t *known = &best[search->one[i]];
        if (selected->is_kept && (*known == 0 || is_better_entry(search, i, *known - 1)))
            *known = i + 1;
    }
    for (size_t i = 0; i < search->count && st == FSDP_OK; i++) {
        const fsdp_selected *selected = fsdp_selection_at(search->selection, i);
        if (!selected->is_kept || best[search->one[i]] == i + 1)
            continue;
        const fsdp_selected *kept = fsdp_selection_at(search->selection, best[search->one[i]] - 1);
        if (selected->dtype != kept->dtype || !can_be_noted(search->rules->target, selected, kept))
            continue;
        st = add_tie(ties, selected, kept, err);
        fsdp_selection_leave_out(search->selection, i);
    }
    fsdp_free(best);
    return st;
}

/*
 * Takes tied names out of the selection. Known ties: aliases, and tensors of a foreign checkpoint that lie in
 * the same bytes. If the rules ask for it, also an output and an input embedding, and names that the class
 * ties, whose bytes are read and are equal.
 */
static fsdp_status drop_ties(fsdp_checkpoint *from, const tie_rules *rules,
                             fsdp_selection *selection, fsdp_ties *ties, fsdp_error *err)
{
    fsdp_tied mode = rules->opts->tied;
    bool notes = rules->target->caps.notes_ties;
    bool is_left = mode == FSDP_TIED_AUTO && (!notes || rules->config == 0);
    if (mode == FSDP_TIED_KEEP || is_left)
        return FSDP_OK;
    tie_search search = {.from = from,
                         .rules = rules,
                         .selection = selection,
                         .count = fsdp_sd_count(from->manifest.sd)};
    search.one = fsdp_alloc(search.count, sizeof *search.one);
    search.is_further = fsdp_alloc(search.count, sizeof *search.is_further);
    bool looks = mode == FSDP_TIED_DROP || rules->config == 1;
    fsdp_status st = search.one && search.is_further
                         ? fsdp_same_tensors(from, looks, search.one, err)
                         : fsdp_fail_memory(err, "tied weights");
    if (st == FSDP_OK && looks)
        st = find_equal(&search, err);
    if (st == FSDP_OK && looks)
        st = find_pairs(&search, err);
    if (st == FSDP_OK)
        st = leave_out(&search, ties, err);
    fsdp_free(search.one);
    fsdp_free(search.is_further);
    return st;
}

/* === the selection ============================================================================ */

static fsdp_status check_ranks(const convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    if (opts->world < 0 || opts->shard_dim < 0 || opts->shard_dim >= FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "world size %d or sharding dim %d is out of range",
                         opts->world, opts->shard_dim);
    bool has_dim = job->format->writer->ops && opts->shard_dim > 0;
    if (!job->format->caps.sharded && (opts->world > 1 || opts->mesh || has_dim))
        return fsdp_fail(
            err, FSDP_ERR_USAGE, "format %s has no ranks; leave out the world size and the mesh%s",
            job->format->name, job->format->writer->ops ? ", and the sharding dim" : "");
    if (job->kind == FSDP_FULL && opts->world > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a full checkpoint is one file: it cannot have a world size of %d",
                         opts->world);
    if (opts->mesh && opts->world > 0 && fsdp_mesh_size(opts->mesh) != opts->world)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has %lld ranks, but the world has %d",
                         (long long)fsdp_mesh_size(opts->mesh), opts->world);
    return FSDP_OK;
}

static fsdp_status choose_mesh(convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    FSDP_TRY(check_ranks(job, err));
    bool is_cut = job->kind != FSDP_FULL && job->format->caps.sharded;
    job->world = !is_cut           ? 1
                 : opts->mesh      ? (int)fsdp_mesh_size(opts->mesh)
                 : opts->world > 0 ? opts->world
                                   : job->from->info.world;
    job->file_count = job->world;
    return is_cut && opts->mesh ? FSDP_OK
                                : fsdp_mesh_create(1, (int64_t[]){job->world},
                                                   (const char *[]){"dp"}, NULL, &job->mesh, err);
}

static fsdp_status form_optim(convert_job *job, fsdp_error *err)
{
    fsdp_optim_form form = job->opts.optim_form;
    bool nests = job->format->caps.nests_groups || job->facts.optim_named > 0;
    if (nests && form == FSDP_OPTIM_FORM_DEFAULT)
        form = FSDP_OPTIM_FORM_NESTED;
    if (job->format->caps.names_groups)
        return fsdp_optim_form_apply(form, &job->sd, &job->source, &job->facts.optim_form, err);
    return form == FSDP_OPTIM_FORM_DEFAULT
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "nested and flat are forms of optimizers in dcp, but the target is %s",
                           job->format->name);
}

static fsdp_status describe_selected(convert_job *job, fsdp_selection *selection, fsdp_error *err)
{
    fsdp_relayout_opts opts = {.kind = job->kind,
                               .mesh = job->mesh ? job->mesh : job->opts.mesh,
                               .shard_dim = job->opts.shard_dim,
                               .under = job->opts.select.under};
    tie_rules rules = {.opts = &job->opts,
                       .target = job->format,
                       .config = job->copies.tied,
                       .class_name = job->config.kind.class_name,
                       .to = job->to};
    FSDP_TRY(drop_ties(job->from, &rules, selection, &job->ties, err));
    FSDP_TRY(fsdp_relayout(job->from->manifest.sd, &opts, selection, &job->sd, &job->source, err));
    FSDP_TRY(form_optim(job, err));
    job->owners = fsdp_alloc(fsdp_sd_count(job->sd), sizeof *job->owners);
    if (!job->owners)
        return fsdp_fail_memory(err, "a conversion");
    if (job->kind != FSDP_LOCAL)
        FSDP_TRY(fsdp_box_plan_owners(job->sd, FSDP_OWNERS_BALANCED, job->owners, err));
    return job->target->declare(job, selection, err);
}

static fsdp_status describe_target(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_selection *selection = NULL;
    const fsdp_sd *from = job->from->manifest.sd;
    FSDP_TRY(choose_mesh(job, err));
    fsdp_select_opts select = job->opts.select;
    if (blocks_of(select.dtype))
        select.dtype = NULL; /* a stage has encoded them */
    const fsdp_select_from source = {
        .sd = from, .is_missing = job->from->is_missing, .known = job->known};
    fsdp_status st = fsdp_selection_create(&source, &select, job->format, &selection, err);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", job->from->path);
    FSDP_TRY(st);
    st = describe_selected(job, selection, err);
    fsdp_export_report report = {0};
    if (st == FSDP_OK)
        st = check_names(job, &report, err);
    plan->model_missing = (int64_t)report.lost;
    if (st == FSDP_OK)
        st = fsdp_plan_note_selected(plan, job, selection, &report, err);
    fsdp_export_report_release(&report);
    fsdp_selection_count(selection, &job->facts.selected);
    job->casts = job->facts.selected.cast > 0;
    fsdp_selection_free(selection);
    return st;
}

/* Chooses the texts that the result has beside its tensors, once the plan has counts of all changes. */
static fsdp_status keep_metadata(convert_job *job, fsdp_error *err)
{
    const fsdp_selection_counts *counts = &job->facts.selected;
    const int64_t changes = counts->renamed + counts->left_out + counts->dropped + counts->cast;
    const fsdp_metadata_from from = {.path = job->from->path,
                                     .carried = job->from->manifest.metadata,
                                     .contradicting =
                                         fsdp_checkpoint_extra(job->from, "contradicting"),
                                     .renamed = counts->renamed,
                                     .is_changed = changes > 0 || job->from->is_derived};
    return fsdp_metadata_choose(&from, &job->opts.select, job->format, &job->metadata, err);
}

/* Every target that takes the option needs the directory, though some only its config.json. A model of the
 * cache of Hugging Face stands for its snapshot. */
static fsdp_status find_copy_from(convert_job *job, fsdp_error *err)
{
    const char *dir = job->opts.copy_from;
    fsdp_file_info info;
    int result = dir ? job->io->ops->info(job->io, dir, &info) : 0;
    if (result < 0)
        return fsdp_remote_path_fail(job->io, dir, -result, err);
    if (dir && info.kind != FSDP_FILE_DIRECTORY)
        return fsdp_fail(err, FSDP_ERR_NOT_FOUND,
                         "'%s' is not a directory; files are copied from the directory of a model",
                         dir);
    if (dir)
        FSDP_TRY(fsdp_hub_snapshot(dir, job->io, &job->copied_snapshot, err));
    if (job->copied_snapshot)
        job->opts.copy_from = job->copied_snapshot;
    return FSDP_OK;
}

static void keep_full(convert_job *job, const fsdp_checkpoint *source)
{
    const fsdp_convert_opts *opts = &job->opts;
    if (!opts->keep_full || source->info.kind != FSDP_FULL || opts->world > 0 || opts->mesh)
        return;
    job->opts.kind = FSDP_FULL;
    job->kind = job->format->caps.has_kinds ? FSDP_FULL : job->kind;
}

/* A config.json that was made of the source goes along, and so do other files that pairs of GGUF make. */
static fsdp_status find_copies(convert_job *job, const fsdp_checkpoint *source, fsdp_error *err)
{
    const bool goes_along = job->config.text && !job->config.path && job->facts.is_mapped;
    fsdp_gguf_files made = {.count = 0};
    const fsdp_copies_places places = {.from = job->from->path,
                                       .to = job->to,
                                       .sd = job->from->manifest.sd,
                                       .config = &job->config,
                                       .made = &made,
                                       .copies_made = goes_along,
                                       .unties = job->unties};
    fsdp_status st = goes_along ? fsdp_gguf_make_files(source->manifest.sd, &made, err) : FSDP_OK;
    if (st == FSDP_OK)
        st = fsdp_copies_open(job->io, &job->opts, &places, &job->copies, err);
    fsdp_gguf_files_release(&made);
    return st;
}

fsdp_status fsdp_convert_select(convert_job *job, const char *from, fsdp_convert_plan *plan,
                                fsdp_error *err)
{
    fsdp_flow("statedict/convert/convert_select.c", "open '%s'", from);
    fsdp_checkpoint *source = NULL;
    FSDP_TRY(open_source(from, &job->opts, &source, err));
    plan->source = job->from = source;
    keep_full(job, source);
    job->facts.rounded = source->source ? fsdp_source_rounded_count(source->source) : 0;
    if (job->format->caps.opaque)
        FSDP_TRY(fsdp_checkpoint_carry_values(source, job->format->caps.classes, err));
    FSDP_TRY(find_copy_from(job, err));
    FSDP_TRY(derive_source(job, source, err));
    FSDP_TRY(find_copies(job, source, err));
    FSDP_TRY(fit_names(job, err));
    FSDP_TRY(describe_target(job, plan, err));
    FSDP_TRY(keep_metadata(job, err));
    job->cast_sums = fsdp_alloc((size_t)job->file_count, sizeof *job->cast_sums);
    return job->cast_sums ? FSDP_OK : fsdp_fail_memory(err, "a conversion");
}
