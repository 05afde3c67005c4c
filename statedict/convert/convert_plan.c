/*
 * Plans a conversion: selects entries, makes the target's layout, divides the memory, counts the files, and
 * checks the destination. Writes nothing. See convert_job.h.
 */
#include "statedict/convert/convert_job.h"

#include "base/data/flow.h"
#include "base/data/name_path.h"
#include "kernels/quants.h"
#include "statedict/checkpoint/digests.h"
#include "statedict/checkpoint/unread.h"
#include "statedict/convert/convert_io.h"
#include "statedict/sd/layout_internal.h"
#include "statedict/convert/plan_notes.h"
#include "statedict/derive/adapter.h"
#include "statedict/derive/dequant.h"
#include "statedict/derive/numbered_optim.h"
#include "statedict/derive/target_types.h"
#include "statedict/derive/tied_names.h"
#include "statedict/map/map.h"
#include "statedict/run/hub_cache.h"
#include "statedict/run/remote_path.h"
#include "statedict/select/metadata.h"
#include "statedict/select/optim_form.h"
#include "statedict/select/relayout.h"
#include "statedict/commit/space.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { CHUNK_LEAST = 64 << 10, BUFFERS_LEAST = 8 << 20 };

bool fsdp_convert_has_data(const convert_job *job, size_t entry)
{
    fsdp_entry_kind kind = fsdp_sd_at(job->sd, entry)->kind;
    return kind == FSDP_ENTRY_TENSOR || (kind == FSDP_ENTRY_ALIAS && job->limits);
}

fsdp_dtype fsdp_convert_source_dtype(const convert_job *job, size_t entry)
{
    const fsdp_sd *from = job->from->manifest.sd;
    return fsdp_sd_at(from, fsdp_sd_tensor_of(from, job->source[entry]))->dtype;
}

/* --- select ----------------------------------------------------------------------------------- */

static fsdp_status check_ranks(const convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    if (opts->world < 0 || opts->shard_dim < 0 || opts->shard_dim >= FSDP_MAX_DIMS)
        return fsdp_fail(err, FSDP_ERR_USAGE, "world size %d or sharding dim %d is out of range",
                         opts->world, opts->shard_dim);
    bool has_ranks = !job->format || job->format->limits.sharded;
    if (!has_ranks && (opts->world > 1 || opts->mesh || (job->limits && opts->shard_dim > 0)))
        return fsdp_fail(err, FSDP_ERR_USAGE, "format %s has no ranks: no world size, no mesh%s",
                         opts->format, job->limits ? ", no sharding dim" : "");
    if (job->kind == FSDP_FULL && opts->world > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "a full checkpoint is one file; it has no world size of %d", opts->world);
    if (opts->mesh && opts->world > 0 && fsdp_mesh_size(opts->mesh) != opts->world)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the mesh has %lld ranks, the world %d",
                         (long long)fsdp_mesh_size(opts->mesh), opts->world);
    return FSDP_OK;
}

static fsdp_status choose_mesh(convert_job *job, fsdp_error *err)
{
    const fsdp_convert_opts *opts = &job->opts;
    FSDP_TRY(check_ranks(job, err));
    bool is_cut = job->kind != FSDP_FULL && (!job->format || job->format->limits.sharded);
    job->world = !is_cut           ? 1
                 : opts->mesh      ? (int)fsdp_mesh_size(opts->mesh)
                 : opts->world > 0 ? opts->world
                                   : job->from->info.world;
    job->file_count = job->world;
    return is_cut && opts->mesh ? FSDP_OK
                                : fsdp_mesh_create(1, (int64_t[]){job->world},
                                                   (const char *[]){"dp"}, NULL, &job->mesh, err);
}

static fsdp_status form_optim(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_optim_form form = job->opts.optim_form;
    bool nests = job->limits && (job->limits->nests_groups || plan->optim_named > 0);
    if (nests && form == FSDP_OPTIM_FORM_DEFAULT)
        form = FSDP_OPTIM_FORM_NESTED;
    if (job->limits && job->limits->names_groups)
        return fsdp_optim_form_apply(form, &job->sd, &job->source, &plan->optim_form, err);
    return form == FSDP_OPTIM_FORM_DEFAULT
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_USAGE,
                           "nested and flat are forms of optimizers in dcp, and the target is %s",
                           job->opts.format ? job->opts.format : "fsdp");
}

static fsdp_status describe_selected(convert_job *job, fsdp_selection *selection,
                                     fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_relayout_opts opts = {.kind = job->kind,
                               .mesh = job->mesh ? job->mesh : job->opts.mesh,
                               .shard_dim = job->opts.shard_dim,
                               .under = job->opts.select.under};
    fsdp_tie_rules rules = {.opts = &job->opts,
                            .limits = job->limits,
                            .config = job->copies.config.tied,
                            .class_name = job->model_kind.class_name,
                            .to = job->to};
    FSDP_TRY(fsdp_ties_drop(job->from, &rules, selection, &job->ties, err));
    FSDP_TRY(fsdp_relayout(job->from->manifest.sd, &opts, selection, &job->sd, &job->source, err));
    FSDP_TRY(form_optim(job, plan, err));
    job->owners = fsdp_alloc(fsdp_sd_count(job->sd), sizeof *job->owners);
    if (!job->owners)
        return fsdp_fail_memory(err, "a conversion");
    if (job->kind != FSDP_LOCAL)
        FSDP_TRY(fsdp_box_plan_owners(job->sd, FSDP_OWNERS_BALANCED, job->owners, err));
    return job->target->declare(job, selection, err);
}

/* "q8_0" of --dtype, which is no cast of single elements. */
static fsdp_dtype blocks_of(const char *dtype)
{
    fsdp_dtype named = dtype ? fsdp_dtype_from_typed(dtype, strlen(dtype)) : FSDP_DTYPE_NONE;
    const fsdp_dtype_info *info = fsdp_dtype_describe(named);
    return info && info->values > 1 ? named : FSDP_DTYPE_NONE;
}

/* The dtype that the model's matrices get; NONE: they keep theirs. */
static fsdp_dtype main_dtype(const fsdp_select_opts *select)
{
    return select->dtype ? fsdp_dtype_from_typed(select->dtype, strlen(select->dtype))
                         : FSDP_DTYPE_NONE;
}

static fsdp_status describe_target(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_selection *selection = NULL;
    const fsdp_sd *from = job->from->manifest.sd;
    FSDP_TRY(choose_mesh(job, err));
    fsdp_select_opts select = job->opts.select;
    if (blocks_of(select.dtype))
        select.dtype = NULL; /* fit_types has made them */
    const fsdp_select_from source = {
        .sd = from, .is_missing = job->from->is_missing, .known = job->known};
    fsdp_status st = fsdp_selection_create(&source, &select, job->limits, &selection, err);
    if (st == FSDP_DIFFERS)
        return fsdp_fail(err, FSDP_DIFFERS, "no name in '%s' matches", job->from->path);
    FSDP_TRY(st);
    st = describe_selected(job, selection, plan, err);
    fsdp_noted noted = {.selection = selection,
                        .count = fsdp_sd_count(from) - job->added.count - job->target_entries,
                        .notes_ties = job->limits && job->limits->notes_tie,
                        .ties = &job->ties,
                        .added = &job->added,
                        .copies = &job->copies,
                        .from = job->from->path,
                        .select = &job->opts.select,
                        .strips = job->rule_list != NULL};
    if (st == FSDP_OK)
        st = fsdp_convert_check_names(job, &noted.model, err);
    plan->model_missing =
        (int64_t)noted.model.lost; /* of a failure: fsdp_plan_note has those that may be */
    if (st == FSDP_OK)
        st = fsdp_unread_list(job->from, &noted.unread, err);
    if (st == FSDP_OK)
        st = fsdp_plan_note(plan, &noted, err);
    fsdp_names_release(&noted.unread);
    fsdp_export_report_release(&noted.model);
    if (st == FSDP_OK)
        st = fsdp_plan_note_code(plan, job, selection, err);
    fsdp_selection_describe(selection, plan);
    job->casts = plan->cast_tensors > 0;
    fsdp_selection_free(selection);
    return st;
}

static fsdp_status check_chunk(int64_t chunk, fsdp_error *err)
{
    if (chunk == 0 || (chunk >= CHUNK_LEAST && chunk <= FSDP_CHUNK_BYTES))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "chunks of %" PRId64 " bytes: %d to %d are allowed",
                     chunk, (int)CHUNK_LEAST, (int)FSDP_CHUNK_BYTES);
}

/* --- derived tensors ---------------------------------------------------------------------------- */

static fsdp_status merge_adapter(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_adapter_report report = {0};
    if (!job->opts.adapter)
        return FSDP_OK;
    const fsdp_adapter_opts opts = {
        .path = job->opts.adapter, .access = &job->opts.open.access, .watch = &job->opts.watch};
    fsdp_status st = fsdp_adapter_merge(&opts, &job->from, &report, err);
    plan->merged = report.merged;
    plan->replaced = report.replaced;
    job->unties = report.unties;
    return st;
}

/* A config.json: its text and path, which is NULL for one that was made. */
typedef struct model_config {
    char *text, *path;
    size_t size;
} model_config;

static fsdp_status dequantize(convert_job *job, const model_config *config, fsdp_convert_plan *plan,
                              fsdp_error *err)
{
    const char *dtype = job->opts.dequant;
    fsdp_dequant_opts opts = {
        .config = config->text, .config_size = config->size, .config_path = config->path};
    fsdp_dequant_report report = {0};
    if (!dtype)
        return FSDP_OK;
    opts.dtype = fsdp_dtype_from_typed(dtype, strlen(dtype));
    if (opts.dtype != FSDP_F32 && opts.dtype != FSDP_BF16 && opts.dtype != FSDP_F16)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "weights are dequantized to f32, bf16 or f16, not to '%s'", dtype);
    fsdp_status st = fsdp_dequantize(&opts, &job->from, &report, err);
    plan->dequantized = report.weights;
    plan->scales = report.scales;
    return st;
}

/* Before the map blocks that the target cannot hold are decoded; behind it blocks are made. */
static fsdp_status fit_types(convert_job *job, fsdp_dtype blocks, fsdp_convert_plan *plan,
                             fsdp_error *err)
{
    const fsdp_target_types types = {job->limits, blocks};
    fsdp_type_report report = {0};
    if (blocks && !fsdp_blocks_can_encode(blocks))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "blocks of %s are read and copied, and not made: q8_0 and q4_0 are, and "
                         "llama-quantize of llama.cpp makes others of a GGUF file in bf16",
                         job->opts.select.dtype);
    if (blocks && job->limits && !job->limits->holds_dtype(blocks))
        return fsdp_fail(err, FSDP_ERR_USAGE, "%s holds no blocks of %s; --to gguf does",
                         job->limits->format, job->opts.select.dtype);
    FSDP_TRY(fsdp_derive_target_types(&types, &job->from, &report, err));
    plan->decoded += report.decoded;
    plan->encoded += report.encoded;
    plan->widened += report.widened;
    return FSDP_OK;
}

/* The loader of a framework may ask for more than the format that the user names: Megatron's files beside
 * those of DCP. */
static void fit_format(convert_job *job, const char *layout)
{
    job->format = fsdp_target_for(job->format, layout);
    job->opts.format = job->format->limits.format;
    job->place.format = job->format;
    job->limits = job->format->ops ? &job->format->limits : NULL;
}

/* Numbers of an optimizer become names, where the target's loaders ask for these. Formats beside these two
 * have numbers because a program wanted them; so may one file of torch.save, without a config.json. */
static fsdp_status name_optim(convert_job *job, const model_config *config, fsdp_convert_plan *plan,
                              fsdp_error *err)
{
    const char *format = fsdp_checkpoint_describe(job->from)->format;
    bool is_torch = strcmp(format, "torch") == 0;
    if (!job->limits || !job->limits->names_groups || job->opts.select.keep_names ||
        job->opts.select.only == FSDP_ONLY_MODEL ||
        (!is_torch && strcmp(format, "safetensors") != 0))
        return FSDP_OK;
    const fsdp_numbered_opts opts = {
        .known = {.paths = true,
                  .model_type = job->model_kind.type[0] ? job->model_kind.type : NULL},
        .keeps_order = is_torch,
        .may_stay = is_torch && !config->text};
    return fsdp_name_numbered(&opts, &job->from, &plan->optim_named, err);
}

/* A model has all names of a tied tensor, and its files one of them. */
static fsdp_status add_tied_names(convert_job *job, const model_config *config, fsdp_error *err)
{
    fsdp_model_config says = {.tied = -1};
    if (!job->limits || !job->limits->all_names || !config->text || job->unties ||
        job->opts.tied != FSDP_TIED_KEEP ||
        fsdp_model_config_read(config->text, config->size, "config.json", &says, NULL) != FSDP_OK)
        return FSDP_OK;
    const fsdp_tied_model model = {.class_name = job->model_kind.class_name, .says = says.tied};
    return fsdp_add_tied_names(&model, &job->from, &job->added, err);
}

/* The source under the names of another framework, if a map is named or needed. */
static fsdp_status rename_by_map(convert_job *job, const model_config *config,
                                 fsdp_convert_plan *plan, fsdp_error *err)
{
    const fsdp_map_request request = {.io = job->io,
                                      .opts = &job->opts,
                                      .config = config->text,
                                      .config_path = config->path,
                                      .config_size = config->size,
                                      .limits = job->limits,
                                      .see_model = fsdp_convert_see_model,
                                      .context = job};
    fsdp_map_sides sides = {0};
    FSDP_TRY(fsdp_map_rename(&request, &job->from, &sides, err));
    const size_t own_count = fsdp_sd_count(job->from->manifest.sd);
    fsdp_gguf_found tokenizer = FSDP_GGUF_TOKENIZER;
    if (sides.needs_pairs)
        FSDP_TRY(fsdp_map_add_gguf_pairs(&request, main_dtype(&job->opts.select), &job->from,
                                         &tokenizer, err));
    plan->lacks_tokenizer = tokenizer != FSDP_GGUF_TOKENIZER;
    plan->has_tiktoken = tokenizer == FSDP_GGUF_TIKTOKEN;
    plan->is_mapped = sides.is_used;
    job->target_entries = fsdp_sd_count(job->from->manifest.sd) - own_count;
    snprintf(plan->map, sizeof plan->map, "%s", sides.name);
    snprintf(plan->map_from, sizeof plan->map_from, "%s", sides.from);
    snprintf(plan->map_to, sizeof plan->map_to, "%s", sides.to);
    if (!plan->is_mapped || !job->format)
        return FSDP_OK;
    fit_format(job, plan->map_to);
    if (strcmp(job->format->limits.format, "megatron") == 0)
        FSDP_TRY(fsdp_map_add_megatron_objects(&job->from, err));
    job->target_entries = fsdp_sd_count(job->from->manifest.sd) - own_count;
    return FSDP_OK;
}

static fsdp_status make_config(const convert_job *job, char **text_out, size_t *size_out,
                               fsdp_error *err)
{
    const fsdp_map_request request = {.io = job->io, .opts = &job->opts, .limits = job->limits};
    return fsdp_map_make_config(&request, job->from, text_out, size_out, err);
}

/* A config.json that cannot be read is no reason to refuse the weights: nothing is known then. */
static void read_kind(convert_job *job, const model_config *config)
{
    if (config->text && fsdp_model_kind_read(config->text, config->size, "config.json",
                                             &job->model_kind, NULL) != FSDP_OK)
        job->model_kind = (fsdp_model_kind){0};
}

/* Puts tensors that are computed from the source's in their place. */
static fsdp_status derive(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    model_config config = {0};
    char *made = NULL;
    fsdp_error why = {0};
    config.text = fsdp_config_find(job->io, job->opts.copy_from, job->from->path, &config.size,
                                   &config.path, &why);
    if (why.status == FSDP_ERR_REFUSED) { /* it says what the tensors are */
        if (err)
            *err = why;
        return FSDP_ERR_REFUSED;
    }
    fsdp_status st = config.text ? FSDP_OK : make_config(job, &made, &config.size, err);
    config.text = config.text ? config.text : made;
    read_kind(job, &config);
    if (st == FSDP_OK)
        st = name_optim(job, &config, plan, err);
    if (st == FSDP_OK)
        st = merge_adapter(job, plan, err);
    if (st == FSDP_OK)
        st = dequantize(job, &config, plan, err);
    if (st == FSDP_OK)
        st = fit_types(job, FSDP_DTYPE_NONE, plan, err);
    if (st == FSDP_OK)
        st = rename_by_map(job, &config, plan, err);
    if (st == FSDP_OK)
        st = add_tied_names(job, &config, err);
    if (st == FSDP_OK)
        st = fit_types(job, blocks_of(job->opts.select.dtype), plan, err);
    fsdp_free(config.path);
    if (made && plan->is_mapped)
        job->made_config = made;
    else
        fsdp_free(config.text);
    return st;
}

/* --- select ----------------------------------------------------------------------------------- */

/* Chooses the texts that the result has beside its tensors, once the plan has counts of all changes. */
static fsdp_status keep_metadata(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    const int64_t changes = plan->renamed + plan->left_out + plan->dropped + plan->cast_tensors;
    const fsdp_metadata_from from = {.path = job->from->path,
                                     .carried = job->from->manifest.metadata,
                                     .contradicting =
                                         fsdp_checkpoint_extra(job->from, "contradicting"),
                                     .renamed = plan->renamed,
                                     .is_changed = changes > 0 || job->from->is_derived};
    fsdp_metadata_choice choice = {0};
    fsdp_status st = fsdp_metadata_choose(&from, &job->opts.select, job->limits, &choice, err);
    if (st == FSDP_OK)
        st = fsdp_plan_note_metadata(plan, &choice.left_out, err);
    job->metadata = choice.kept;
    choice.kept = NULL;
    fsdp_metadata_choice_release(&choice);
    return st;
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
                         "'%s' is no directory: files are copied from one of a model", dir);
    if (dir)
        FSDP_TRY(fsdp_hub_snapshot(dir, job->io, &job->copied_snapshot, err));
    if (job->copied_snapshot)
        job->opts.copy_from = job->copied_snapshot;
    return FSDP_OK;
}

static void keep_full(convert_job *job)
{
    const fsdp_convert_opts *opts = &job->opts;
    if (!opts->keep_full || job->from->info.kind != FSDP_FULL || opts->world > 0 || opts->mesh)
        return;
    job->opts.kind = FSDP_FULL;
    job->kind = job->format ? job->kind : FSDP_FULL;
}

static fsdp_status select_entries(convert_job *job, const char *from, fsdp_convert_plan *plan,
                                  fsdp_error *err)
{
    if (!job->limits)
        FSDP_TRY(check_chunk(job->opts.chunk_bytes, err));
    fsdp_flow("statedict/convert/convert_plan.c", "open '%s'", from);
    FSDP_TRY(fsdp_convert_open(from, &job->opts, &job->from, err));
    plan->source = job->from;
    keep_full(job);
    plan->rounded = job->from->source ? fsdp_source_rounded_count(job->from->source) : 0;
    if (!job->limits || job->limits->opaque)
        FSDP_TRY(fsdp_checkpoint_carry_values(job->from, !job->limits, err));
    FSDP_TRY(find_copy_from(job, err));
    FSDP_TRY(derive(job, plan, err));
    const fsdp_copies_places places = {job->from->path, job->to, job->from->manifest.sd,
                                       job->made_config, job->unties};
    FSDP_TRY(fsdp_copies_open(job->io, &job->opts, &places, &job->copies, err));
    FSDP_TRY(fsdp_convert_fit_names(job, err));
    FSDP_TRY(describe_target(job, plan, err));
    FSDP_TRY(keep_metadata(job, plan, err));
    job->cast_sums = fsdp_alloc((size_t)job->file_count, sizeof *job->cast_sums);
    return job->cast_sums ? FSDP_OK : fsdp_fail_memory(err, "a conversion");
}

/* --- memory ----------------------------------------------------------------------------------- */

static int64_t budget(const convert_job *job)
{
    return job->opts.memory > 0 ? job->opts.memory : FSDP_MEMORY_DEFAULT;
}

static void limit_threads(convert_job *job, int64_t most)
{
    if (most < job->threads)
        job->threads = most < 1 ? 1 : (int)most;
}

static int64_t clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}

/* Bytes that do not depend on the budget. */
static int64_t fixed_room(const convert_job *job, const convert_room *room)
{
    enum { TEXT_BYTES = 300 }; /* of an entry in a manifest, in a buffer that doubles its size */
    int64_t finishing = room->per_thread * job->threads;
    int64_t publishing = 2 * TEXT_BYTES * (int64_t)fsdp_sd_count(job->sd);
    return room->fixed + (room->per_thread > 0 && finishing < publishing ? publishing : finishing);
}

/* Encoders hold twice four chunks per thread, and every file may hold an incomplete chunk. */
static int64_t encoder_chunks(const convert_job *job)
{
    return 8 * job->threads + job->group_files;
}

/*
 * A quarter for the records of files, half for slabs, the rest for finishing and checking files. An encoded
 * target: a quarter for slabs, half for chunks.
 */
static void divide_memory(convert_job *job)
{
    convert_room room = job->target->room(job);
    bool encoded = job->from->info.compressed, encodes = job->opts.compress && !job->limits;
    fsdp_reading reading = fsdp_checkpoint_reading(job->from);
    int64_t memory = budget(job), apart = reading.apart;
    job->threads = fsdp_block_readers_within(job->opts.threads, memory / 4, encoded);
    limit_threads(job, reading.threads);
    if (reading.per_thread > 0)
        limit_threads(job, memory / 2 / reading.per_thread);
    memory -= reading.per_thread * job->threads;
    if (room.per_thread > 0)
        limit_threads(job, memory / 4 / room.per_thread);
    if (!job->target->is_ordered)
        limit_threads(job, apart / room.slab_least);
    job->workers = encodes ? 1 : job->threads;
    if (room.fixed > 0) {
        memory -= fixed_room(job, &room);
        memory = memory < BUFFERS_LEAST ? BUFFERS_LEAST : memory;
    }
    int64_t files = room.per_file > 0 ? memory / 4 / room.per_file : job->file_count;
    job->group_files = (int)clamp(files, 1, job->file_count);
    int64_t slab = memory / (encodes ? 4 : 2) / job->threads - fsdp_block_reader_bytes(encoded);
    apart /= job->target->is_ordered ? 1 : job->threads;
    job->slab_bytes = clamp(slab < apart ? slab : apart, room.slab_least, room.slab_most);
    job->chunk_bytes = FSDP_CHUNK_BYTES;
    while (job->chunk_bytes > memory / 2 / encoder_chunks(job) && job->chunk_bytes > CHUNK_LEAST)
        job->chunk_bytes /= 2;
    if (job->opts.chunk_bytes > 0)
        job->chunk_bytes = job->opts.chunk_bytes;
}

static int64_t peak_memory(const convert_job *job)
{
    convert_room room = job->target->room(job);
    int64_t worker = job->slab_bytes + fsdp_block_reader_bytes(job->from->info.compressed) +
                     fsdp_checkpoint_reading(job->from).per_thread;
    int64_t chunks =
        job->opts.compress && !job->limits ? job->chunk_bytes * encoder_chunks(job) : 0;
    return fixed_room(job, &room) + worker * job->workers + chunks +
           room.per_file * job->group_files;
}

/* A slab is read in its pieces, column by column if they are columns; every group reads all tensors. */
static fsdp_status announce_reading(convert_job *job, fsdp_error *err)
{
    int64_t apart = fsdp_checkpoint_reading(job->from).apart;
    bool columns = job->file_count > 1 && job->opts.shard_dim > 0 && job->slab_bytes > apart;
    bool repeated = columns || job->group_files < job->file_count;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++)
        if (fsdp_convert_has_data(job, i))
            FSDP_TRY(fsdp_checkpoint_announce(job->from, job->source[i], repeated, err));
    return FSDP_OK;
}

/* --- memory and threads ----------------------------------------------------------------------- */

static bool is_in_tuple(const fsdp_entry *entry)
{
    for (size_t i = 0; i < entry->path_count; i++)
        if (fsdp_path_in_tuple(entry->path[i]))
            return true;
    return false;
}

static fsdp_status count_work(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    plan->world = job->world;
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_entry *entry = fsdp_sd_at(job->sd, i);
        bool has_data = fsdp_convert_has_data(job, i);
        plan->tensors += has_data;
        plan->values += entry->kind == FSDP_ENTRY_VALUE;
        plan->aliases += entry->kind == FSDP_ENTRY_ALIAS && !has_data;
        if (!has_data)
            continue;
        plan->in_tuples += job->limits && job->limits->lists_tuples && is_in_tuple(entry);
        entry = fsdp_sd_at(job->sd, fsdp_sd_tensor_of(job->sd, i));
        int64_t bytes = fsdp_entry_bytes(entry);
        job->tensor_bytes += bytes;
        plan->bytes_read += bytes / (int64_t)fsdp_dtype_size(entry->dtype) *
                            (int64_t)fsdp_dtype_size(fsdp_convert_source_dtype(job, i));
    }
    if (job->world > 1 && job->kind == FSDP_SHARDED)
        plan->short_tensors = fsdp_relayout_count_short(job->sd, job->opts.shard_dim);
    if (!job->opts.skip_verify)
        plan->bytes_checked =
            fsdp_checkpoint_check_bytes(job->from) + fsdp_digests_bytes(job->io, job->from->path);
    plan->bytes_spooled = fsdp_checkpoint_reading(job->from).spooled;
    plan->peak_memory = peak_memory(job);
    return job->target->measure(job, plan, err);
}

/* Checks the memory for descriptions of many tensors, which the budget does not limit. */
static fsdp_status check_memory(const convert_job *job, const fsdp_convert_plan *plan,
                                fsdp_error *err)
{
    const int64_t beside = 32 << 20, unit = 1 << 20;
    int64_t wanted = plan->peak_memory - beside;
    if (job->opts.memory <= 0 || wanted <= job->opts.memory)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_LIMIT,
                     "converting %zu entries into %d files takes %" PRId64
                     " MiB of memory: allow %" PRId64 "M or more",
                     fsdp_sd_count(job->sd), job->file_count, (plan->peak_memory + unit - 1) / unit,
                     (wanted + unit - 1) / unit);
}

/* The result must fit on the disk before work starts; compression is not counted, since it is unknown. */
static fsdp_status check_space(const convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_space space;
    int64_t more = plan->bytes_spooled;
    bool encodes = job->opts.compress && !job->limits;
    if (job->opts.resume && !encodes)
        more -= fsdp_resume_bytes(job->io, job->to, job->hash);
    fsdp_volume volume = {.kind = job->kind,
                          .world = job->file_count,
                          .compress = encodes,
                          .with_view = !job->opts.skip_view,
                          .is_exact = job->limits != NULL,
                          .more = more};
    plan->bytes_needed =
        job->limits ? plan->bytes_written + more : fsdp_volume_room(job->sd, &volume);
    fsdp_status st = fsdp_require_space(job->io, job->to, &volume, plan->bytes_needed, &space, err);
    plan->free_bytes = space.free_bytes;
    return st;
}

/* After a failure because something is at the target: finds out whether it could be replaced. */
static fsdp_status ask_overwrite(convert_job *job, fsdp_convert_plan *plan, fsdp_error *err)
{
    fsdp_error other = {0};
    if (job->opts.overwrite)
        return FSDP_ERR_EXISTS;
    job->opts.overwrite = job->place.overwrite = true;
    fsdp_status st = job->target->check_place(job, &other);
    if (st == FSDP_OK)
        st = check_memory(job, plan, &other);
    if (st == FSDP_OK)
        st = check_space(job, plan, &other);
    job->opts.overwrite = job->place.overwrite = false;
    plan->may_overwrite = st == FSDP_OK;
    if (st == FSDP_ERR_EXISTS && err)
        *err = other;
    return FSDP_ERR_EXISTS;
}

fsdp_status fsdp_convert_prepare(convert_job *job, const char *from, fsdp_convert_plan *plan,
                                 fsdp_error *err)
{
    FSDP_TRY(select_entries(job, from, plan, err));
    FSDP_TRY(fsdp_checkpoint_set_memory(job->from, job->opts.memory, job->to, err));
    divide_memory(job);
    FSDP_TRY(announce_reading(job, err));
    FSDP_TRY(count_work(job, plan, err));
    fsdp_flow("statedict/convert/convert_plan.c", "plan: %d files, slabs of at most %lld bytes",
              plan->files, (long long)job->slab_bytes);
    FSDP_TRY(fsdp_plan_identify(job, job->hash, err));
    fsdp_status st = job->target->check_place(job, err);
    if (st == FSDP_ERR_EXISTS)
        return ask_overwrite(job, plan, err);
    FSDP_TRY(st);
    FSDP_TRY(check_memory(job, plan, err));
    return check_space(job, plan, err);
}
