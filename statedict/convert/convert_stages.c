/*
 * The stages between the opened source and the entries that a conversion selects: each replaces a checkpoint
 * by one of derived tensors, which are computed from the other's while they are read. Their order is that of
 * the table below; the plan lists those that changed something. See convert_job.h.
 */
#include "statedict/convert/convert_job.h"

#include "kernels/quants.h"
#include "statedict/derive/adapter.h"
#include "statedict/derive/dequant.h"
#include "statedict/derive/numbered_optim.h"
#include "statedict/derive/target_types.h"
#include "statedict/derive/tied_names.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

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

/* Decodes blocks that the target cannot hold, and widens vectors that it wants in f32; `blocks`, unless NONE,
 * is the type that matrices are encoded in. */
static fsdp_status fit_types(convert_stages *stages, fsdp_dtype blocks, fsdp_checkpoint **from,
                             char text[FSDP_STAGE_TEXT], fsdp_error *err)
{
    const convert_job *job = stages->job;
    const fsdp_target_types types = {job->format, blocks};
    fsdp_type_report report = {0};
    FSDP_TRY(fsdp_derive_target_types(&types, from, &report, err));
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
    return fit_types(stages, FSDP_DTYPE_NONE, from, text, err);
}

fsdp_dtype fsdp_convert_blocks_of(const char *dtype)
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
    fsdp_dtype blocks = fsdp_convert_blocks_of(dtype);
    if (blocks && !fsdp_blocks_can_encode(blocks))
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "blocks of %s can be read and copied, but not made; q8_0 and q4_0 can be made, "
            "and llama-quantize of llama.cpp makes others from a GGUF file in bf16",
            dtype);
    if (blocks && !job->format->writer->holds_dtype(blocks))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s holds no blocks of %s; --to gguf does",
                         job->format->name, dtype);
    return fit_types(stages, blocks, from, text, err);
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
    if (why.status == FSDP_ERR_REFUSED) { /* it says what the tensors are */
        if (err)
            *err = why;
        return FSDP_ERR_REFUSED;
    }
    const fsdp_map_request request = {.io = job->io, .opts = &job->opts, .target = job->format};
    if (!job->config.text)
        FSDP_TRY(fsdp_map_make_config(&request, from, &job->config, err));
    /* One that is not JSON is no reason to refuse the weights: nothing is known then. */
    if (job->config.error.status == FSDP_ERR_LIMIT)
        return fsdp_config_check(&job->config, err);
    stages->config = job->config.text ? &job->config : NULL;
    return FSDP_OK;
}

fsdp_status fsdp_convert_derive(convert_job *job, fsdp_checkpoint *source, fsdp_error *err)
{
    convert_stages stages = {.job = job};
    fsdp_checkpoint *from = source;
    fsdp_status st = find_config(&stages, from, err);
    stages.request = (fsdp_map_request){.io = job->io,
                                        .opts = &job->opts,
                                        .config = stages.config,
                                        .target = job->format,
                                        .see_model = fsdp_convert_see_model,
                                        .context = job};
    if (st == FSDP_OK)
        st = run_stages(&stages, &from, err);
    job->from = from;
    return st;
}
