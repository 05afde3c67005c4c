/* Dequantizes the weights of a model: see dequant.h. */
#include "statedict/derive/dequant.h"
#include "base/text.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/derive/derived_scaled.h"
#include "statedict/sd/layout_internal.h"
#include <fsdp/status.h>

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* === quantization_config ====================================================================== */

/* The blocks of a weight that have one scale, as quantization_config of config.json gives them. */

typedef struct fsdp_quant_blocks {
    int64_t size[2];    /* rows and columns, if they are given */
    bool is_given;      /* weight_block_size, or block_structure of compressed-tensors */
    bool is_none;       /* weight_block_size is null: there are no blocks */
    const char *member; /* that gives the size */
} fsdp_quant_blocks;

static const char whole_size[] = "weight_block_size", group_size[] = "block_structure";

/* "[128, 128]"; FSDP_ERR_USAGE where another member has another size. */
static fsdp_status read_size(const fsdp_value *value, const char *member, const char *path,
                             fsdp_quant_blocks *blocks, fsdp_error *err)
{
    int64_t pair[2] = {0};
    for (size_t i = 0; value->kind == FSDP_VALUE_LIST && i < 2 && i < value->as.list.count; i++)
        if (value->as.list.items[i].kind == FSDP_VALUE_I64)
            pair[i] = value->as.list.items[i].as.i64;
    if (value->kind != FSDP_VALUE_LIST || value->as.list.count != 2 || pair[0] < 1 || pair[1] < 1)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "'%s': %s is not a pair of positive numbers, the size of blocks", path,
                         member);
    if (blocks->is_given && (pair[0] != blocks->size[0] || pair[1] != blocks->size[1]))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "'%s' has blocks of %" PRId64 " x %" PRId64 " and of %" PRId64
                         " x %" PRId64 ", but --dequant takes one size",
                         path, blocks->size[0], blocks->size[1], pair[0], pair[1]);
    *blocks = (fsdp_quant_blocks){.size = {pair[0], pair[1]}, .is_given = true, .member = member};
    return FSDP_OK;
}

/* Groups of compressed-tensors have their sizes some levels below. */
static fsdp_status read_quantization(const fsdp_value *object, const char *path,
                                     fsdp_quant_blocks *blocks, fsdp_error *err)
{
    for (size_t i = 0; i < object->as.list.count; i += 2) {
        const fsdp_value *key = &object->as.list.items[i], *value = key + 1;
        const char *member =
            fsdp_bytes_are(key->as.bytes.data, key->as.bytes.size, whole_size)   ? whole_size
            : fsdp_bytes_are(key->as.bytes.data, key->as.bytes.size, group_size) ? group_size
                                                                                 : NULL;
        if (member && value->kind == FSDP_VALUE_NULL)
            blocks->is_none |= member == whole_size;
        else if (member)
            FSDP_TRY(read_size(value, member, path, blocks, err));
        else if (value->kind == FSDP_VALUE_DICT)
            FSDP_TRY(read_quantization(value, path, blocks, err));
    }
    return FSDP_OK;
}

/* FSDP_ERR_DAMAGED: the size is not a pair of positive numbers; FSDP_ERR_USAGE: there are several sizes. */
static fsdp_status read_blocks(const fsdp_config_file *config, fsdp_quant_blocks *blocks,
                               fsdp_error *err)
{
    FSDP_TRY(fsdp_config_check(config, err));
    /* the model itself, and its part for text */
    const fsdp_value *models[] = {&config->json, fsdp_config_at(&config->json, "text_config")};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const fsdp_value *object = fsdp_config_at(models[i], "quantization_config");
        if (object && object->kind == FSDP_VALUE_DICT)
            FSDP_TRY(read_quantization(object, fsdp_config_name(config), blocks, err));
    }
    return FSDP_OK;
}

/* === weights ================================================================================== */

enum { USUAL_BLOCK = 128 }; /* of transformers, where config.json says nothing */

typedef struct dequant_job {
    const fsdp_dequant_opts *opts;
    fsdp_derivation *derivation;
    fsdp_checkpoint *base;
    const fsdp_sd *sd;
    fsdp_quant_blocks blocks; /* of config.json */
    bool lacks_memory;        /* a name could not be made, so what sibling() said does not count */
    fsdp_dequant_report report;
} dequant_job;

/* --- names -------------------------------------------------------------------------------------- */

static bool ends(const fsdp_entry *entry, const char *end)
{
    return fsdp_bytes_end(entry->name, entry->name_size, end);
}

/* The entry whose name is this one's with another end; -1: none. */
static int64_t sibling(dequant_job *job, const fsdp_entry *entry, const char *cut, const char *end)
{
    fsdp_text name = {0};
    fsdp_text_add(&name, entry->name, entry->name_size - strlen(cut));
    fsdp_text_addf(&name, "%s", end);
    job->lacks_memory = job->lacks_memory || name.failed;
    int64_t found = name.failed ? -1 : fsdp_sd_find(job->sd, name.data, name.size);
    fsdp_text_release(&name);
    return found >= 0 && fsdp_sd_at(job->sd, (size_t)found)->kind != FSDP_ENTRY_VALUE ? found : -1;
}

static bool is_f8(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info->is_float && info->size == 1 && dtype != FSDP_F8_E8M0FNU;
}

/* The scales of a weight of 8 bits, as transformers and DeepSeek, compressed-tensors, and DeepSeek's own
 * files name them; -1: none. Two of them would be two weights. */
static fsdp_status find_scales(dequant_job *job, const fsdp_entry *weight, int64_t *out,
                               fsdp_error *err)
{
    static const char *const ways[][2] = {{"", "_scale_inv"}, {"", "_scale"}, {"weight", "scale"}};
    *out = -1;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        bool is_way = !ways[i][0][0] || ends(weight, ".weight");
        int64_t found = is_way ? sibling(job, weight, ways[i][0], ways[i][1]) : -1;
        char one[200], other[200];
        if (found >= 0 && *out >= 0) {
            const fsdp_entry *first = fsdp_sd_at(job->sd, (size_t)*out);
            const fsdp_entry *second = fsdp_sd_at(job->sd, (size_t)found);
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "it has two scales, '%s' and '%s'",
                             fsdp_printable(first->name, first->name_size, one, sizeof one),
                             fsdp_printable(second->name, second->name_size, other, sizeof other));
        }
        *out = found >= 0 ? found : *out;
    }
    return FSDP_OK;
}

/* Scales of activations and of the cache, which only a quantized model uses. */
static bool is_of_activations(dequant_job *job, const fsdp_entry *entry)
{
    static const char *const names[] = {".input_scale", ".output_scale", ".activation_scale",
                                        ".q_scale",     ".k_scale",      ".v_scale"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int64_t weight = ends(entry, names[i]) ? sibling(job, entry, names[i], ".weight") : -1;
        if (ends(entry, names[i]) &&
            (i > 2 || (weight >= 0 && is_f8(fsdp_sd_at(job->sd, (size_t)weight)->dtype))))
            return true;
    }
    return false;
}

/* True when the entry belongs to a quantized weight and goes with it. */
static bool is_beside_weight(dequant_job *job, const fsdp_entry *entry)
{
    static const char *const scale_ends[][2] = {
        {"_scale_inv", ""}, {"_scale", ""}, {".scale", ".weight"}};
    for (size_t i = 0; i < 3; i++) {
        int64_t weight = ends(entry, scale_ends[i][0])
                             ? sibling(job, entry, scale_ends[i][0], scale_ends[i][1])
                             : -1;
        if (weight >= 0 && is_f8(fsdp_sd_at(job->sd, (size_t)weight)->dtype))
            return true;
    }
    return (ends(entry, "_scales") && sibling(job, entry, "_scales", "_blocks") >= 0) ||
           is_of_activations(job, entry);
}

/* --- fp8 ---------------------------------------------------------------------------------------- */

/* The scales have one row for `size` rows of the weight, in the last two dims, and one for each in others. */
static bool fit_blocks(const fsdp_derived *weight, const fsdp_derived *scales,
                       const int64_t size[2], int64_t *blocks_out)
{
    for (int d = 0; d < weight->ndim; d++) {
        int behind = weight->ndim - 1 - d;
        int64_t rows = weight->shape[d], block = behind < 2 ? size[1 - behind] : 1;
        if (rows / block + (rows % block != 0) != scales->shape[d])
            return false;
        blocks_out[d] = block;
    }
    return true;
}

/* In each dim there is one scale, or one for each row. */
static bool fit_rows(const fsdp_derived *weight, const fsdp_derived *scales, int64_t *blocks_out)
{
    for (int d = 0; d < weight->ndim; d++) {
        int64_t rows = weight->shape[d];
        if (scales->shape[d] != 1 && scales->shape[d] != rows)
            return false;
        blocks_out[d] = scales->shape[d] == rows ? 1 : rows;
    }
    return true;
}

/* Finds the rows of the weight for a row of the scales. */
static bool find_blocks(const dequant_job *job, const fsdp_derived *weight,
                        const fsdp_derived *scales, int64_t *blocks_out)
{
    static const int64_t usual[2] = {USUAL_BLOCK, USUAL_BLOCK};
    if (weight->ndim != scales->ndim || weight->ndim == 0)
        return false;
    if (job->blocks.is_given)
        return fit_blocks(weight, scales, job->blocks.size, blocks_out);
    return fit_rows(weight, scales, blocks_out) ||
           (!job->blocks.is_none && fit_blocks(weight, scales, usual, blocks_out));
}

/* A scale of a tensor, or scales of its rows, get the dims that they lack. */
static fsdp_status fit_dims(const dequant_job *job, const fsdp_derived *weight,
                            const fsdp_derived **scales, fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS];
    const fsdp_derived *given = *scales;
    bool is_one = fsdp_shape_count(given->ndim, given->shape) == 1;
    bool is_rows = given->ndim == 1 && weight->ndim > 0 && given->shape[0] == weight->shape[0];
    if (given->ndim == weight->ndim || (!is_one && !is_rows))
        return FSDP_OK;
    for (int d = 0; d < weight->ndim; d++)
        shape[d] = d == 0 && is_rows ? given->shape[0] : 1;
    return fsdp_derive_reshape(fsdp_derivation_arena(job->derivation), given, weight->ndim, shape,
                               scales, err);
}

static fsdp_status refuse_scales(const dequant_job *job, const fsdp_derived *weight,
                                 const fsdp_derived *scales, fsdp_error *err)
{
    char w[128], s[128];
    const fsdp_quant_blocks *blocks = &job->blocks;
    fsdp_derived_text(scales, s, sizeof s);
    fsdp_derived_text(weight, w, sizeof w);
    if (blocks->is_given)
        return fsdp_fail(err, FSDP_ERR_DAMAGED,
                         "scales of %s do not fit a weight of %s in blocks of %" PRId64
                         " x %" PRId64 ", which config.json has (%s)",
                         s, w, blocks->size[0], blocks->size[1], blocks->member);
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "scales of %s do not fit a weight of %s: %s", s, w,
                     blocks->is_none
                         ? "config.json has no blocks (weight_block_size is null)"
                         : "they are not those of the tensor, of rows, or of blocks of 128 x 128, "
                           "and config.json names no other size (weight_block_size)");
}

static fsdp_status scale_weight(const dequant_job *job, size_t number, int64_t scales_number,
                                const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(job->derivation);
    const fsdp_derived *weight = NULL, *scales = NULL;
    int64_t blocks[FSDP_MAX_DIMS];
    FSDP_TRY(fsdp_derive_stored(arena, job->base, number, &weight, err));
    FSDP_TRY(fsdp_derive_stored(arena, job->base, (size_t)scales_number, &scales, err));
    const fsdp_derived *given = scales;
    FSDP_TRY(fit_dims(job, weight, &scales, err));
    return find_blocks(job, weight, scales, blocks)
               ? fsdp_derive_block_scaled(arena, weight, scales, blocks, out, err)
               : refuse_scales(job, weight, given, err);
}

/* --- MXFP4 -------------------------------------------------------------------------------------- */

static fsdp_status unpack_blocks(const dequant_job *job, size_t number, int64_t scales_number,
                                 const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(job->derivation);
    const fsdp_derived *blocks = NULL, *exponents = NULL;
    int order[FSDP_MAX_DIMS];
    FSDP_TRY(fsdp_derive_stored(arena, job->base, number, &blocks, err));
    FSDP_TRY(fsdp_derive_stored(arena, job->base, (size_t)scales_number, &exponents, err));
    FSDP_TRY(fsdp_derive_mxfp4(arena, blocks, exponents, out, err));
    int ndim = (*out)->ndim;
    for (int d = 0; d < ndim; d++)
        order[d] = d < ndim - 2 || ndim < 2 ? d : 2 * ndim - 3 - d;
    return fsdp_derive_permute(arena, *out, order, out, err);
}

/* --- the whole ---------------------------------------------------------------------------------- */

static fsdp_status add_weight(dequant_job *job, size_t number, fsdp_derived_name name,
                              const fsdp_derived *weight, fsdp_error *err)
{
    FSDP_TRY(fsdp_derive_cast(fsdp_derivation_arena(job->derivation), weight, job->opts->dtype,
                              &weight, err));
    job->report.weights++;
    return fsdp_derivation_replace(job->derivation, number, name, weight, err);
}

static fsdp_status add_tensor(dequant_job *job, size_t number, fsdp_error *err)
{
    static const char blocks[] = "_blocks";
    const fsdp_entry *entry = fsdp_sd_at(job->sd, number);
    fsdp_derived_name name = {entry->name, entry->name_size};
    const fsdp_derived *weight = NULL;
    int64_t packed = ends(entry, blocks) ? sibling(job, entry, blocks, "_scales") : -1;
    if (is_beside_weight(job, entry)) {
        job->report.scales++;
        return FSDP_OK;
    }
    if (packed >= 0) {
        FSDP_TRY(unpack_blocks(job, number, packed, &weight, err));
        name.size -= sizeof blocks - 1;
        return add_weight(job, number, name, weight, err);
    }
    if (fsdp_dtype_describe(entry->dtype)->values > 1) {
        fsdp_arena *arena = fsdp_derivation_arena(job->derivation);
        FSDP_TRY(fsdp_derive_stored(arena, job->base, number, &weight, err));
        FSDP_TRY(fsdp_derive_values(arena, weight, &weight, err));
        return add_weight(job, number, name, weight, err);
    }
    if (ends(entry, ".qweight"))
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "it is quantized by GPTQ or AWQ, which --dequant does not support");
    if (!is_f8(entry->dtype))
        return fsdp_derivation_keep(job->derivation, number, err);
    int64_t scales;
    FSDP_TRY(find_scales(job, entry, &scales, err));
    if (scales < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "it has 8 bits but no scales; cast it as it is with --dtype");
    FSDP_TRY(scale_weight(job, number, scales, &weight, err));
    return add_weight(job, number, name, weight, err);
}

static fsdp_status add_entry(dequant_job *job, size_t number, fsdp_error *err)
{
    const fsdp_entry *entry = fsdp_sd_at(job->sd, number);
    if (entry->kind != FSDP_ENTRY_TENSOR)
        return fsdp_derivation_keep(job->derivation, number, err);
    fsdp_status st = add_tensor(job, number, err);
    char shown[200];
    if (job->lacks_memory)
        return fsdp_fail_memory(err, "a name");
    if (st == FSDP_ERR_USAGE || st == FSDP_ERR_DAMAGED)
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    return st;
}

fsdp_status fsdp_dequantize(const fsdp_dequant_opts *opts, fsdp_checkpoint **checkpoint,
                            fsdp_dequant_report *report_out, fsdp_error *err)
{
    dequant_job job = {.opts = opts, .base = *checkpoint, .sd = (*checkpoint)->manifest.sd};
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(job.base, &job.derivation, err));
    const char *path = opts->config ? opts->config->path : NULL;
    fsdp_status st = fsdp_derivation_note_file(job.derivation, path, err);
    if (st == FSDP_OK && opts->config)
        st = read_blocks(opts->config, &job.blocks, err);
    for (size_t i = 0; i < fsdp_sd_count(job.sd) && st == FSDP_OK; i++)
        st = add_entry(&job, i, err);
    if (st == FSDP_OK && job.report.weights == 0)
        st = fsdp_fail(err, FSDP_ERR_USAGE,
                       "'%s' has no quantized weights that --dequant supports: fp8 with scales, "
                       "MXFP4, blocks of GGUF",
                       job.base->path);
    *report_out = job.report;
    if (st == FSDP_OK)
        return fsdp_derivation_finish(job.derivation, checkpoint, err);
    fsdp_derivation_cancel(job.derivation);
    return st;
}
