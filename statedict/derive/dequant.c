/* Dequantizes the weights of a model: see dequant.h. */
#include "statedict/derive/dequant.h"

#include "base/data/json.h"
#include "base/text.h"
#include "statedict/derive/derived_checkpoint.h"
#include "statedict/derive/derived_scaled.h"
#include "statedict/sd/layout_internal.h"

#include <inttypes.h>
#include <string.h>

enum { USUAL_BLOCK = 128 };

typedef struct dequant_job {
    const fsdp_dequant_opts *opts;
    fsdp_derivation *derivation;
    fsdp_checkpoint *base;
    const fsdp_sd *sd;
    int64_t block[2];  /* rows and columns, of config.json; 0: not known */
    bool lacks_memory; /* a name could not be made, so what sibling() said does not count */
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

/* The scales of a weight of 8 bits, as transformers and DeepSeek, compressed-tensors, and
 * DeepSeek's own files name them; -1: none. */
static int64_t scales_of(dequant_job *job, const fsdp_entry *weight)
{
    int64_t found = sibling(job, weight, "", "_scale_inv");
    if (found < 0)
        found = sibling(job, weight, "", "_scale");
    if (found < 0 && ends(weight, ".weight"))
        found = sibling(job, weight, "weight", "scale");
    return found;
}

/* Scales of activations and of the cache, which only a quantized model uses. */
static bool is_of_activations(dequant_job *job, const fsdp_entry *entry)
{
    static const char *const names[] = {".input_scale", ".output_scale", ".q_scale", ".k_scale",
                                        ".v_scale"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int64_t weight = ends(entry, names[i]) ? sibling(job, entry, names[i], ".weight") : -1;
        if (ends(entry, names[i]) &&
            (i > 1 || (weight >= 0 && is_f8(fsdp_sd_at(job->sd, (size_t)weight)->dtype))))
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

static int64_t rows_over(int64_t rows, int64_t block)
{
    return rows / block + (rows % block != 0);
}

/* Rows of the weight for a row of the scales; 0: they do not fit. Dim `behind` counts from the end. */
static int64_t block_of(const dequant_job *job, int64_t rows, int64_t scales, int behind)
{
    int64_t known = behind < 2 ? job->block[1 - behind] : 0;
    if (known > 0 && known < INT32_MAX && rows_over(rows, known) == scales)
        return known;
    if (scales > 1 && scales < rows && behind < 2 && rows_over(rows, USUAL_BLOCK) == scales)
        return USUAL_BLOCK;
    return scales > 0 && rows % scales == 0 ? rows / scales : 0;
}

/* Scales of a tensor, or of its rows, get the dims that they lack. */
static fsdp_status fit_dims(const dequant_job *job, const fsdp_derived *weight,
                            const fsdp_derived **scales, fsdp_error *err)
{
    int64_t shape[FSDP_MAX_DIMS];
    const fsdp_derived *given = *scales;
    if (given->ndim == weight->ndim)
        return FSDP_OK;
    for (int d = 0; d < weight->ndim; d++)
        shape[d] = 1;
    if (given->ndim == 1 && weight->ndim > 0 && given->shape[0] == weight->shape[0])
        shape[0] = given->shape[0];
    return fsdp_derive_reshape(fsdp_derivation_arena(job->derivation), given, weight->ndim, shape,
                               scales, err);
}

static fsdp_status scale_weight(const dequant_job *job, size_t number, int64_t scales_number,
                                const fsdp_derived **out, fsdp_error *err)
{
    fsdp_arena *arena = fsdp_derivation_arena(job->derivation);
    const fsdp_derived *weight = NULL, *scales = NULL;
    int64_t blocks[FSDP_MAX_DIMS];
    FSDP_TRY(fsdp_derive_stored(arena, job->base, number, &weight, err));
    FSDP_TRY(fsdp_derive_stored(arena, job->base, (size_t)scales_number, &scales, err));
    FSDP_TRY(fit_dims(job, weight, &scales, err));
    for (int d = 0; d < weight->ndim; d++)
        blocks[d] = block_of(job, weight->shape[d], scales->shape[d], weight->ndim - 1 - d);
    return fsdp_derive_block_scaled(arena, weight, scales, blocks, out, err);
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
                         "it is quantized by GPTQ or AWQ, which --dequant does not know");
    if (!is_f8(entry->dtype))
        return fsdp_derivation_keep(job->derivation, number, err);
    int64_t scales = scales_of(job, entry);
    if (scales < 0)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "it has 8 bits and no scales: --dtype casts it as it is");
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
    if (st == FSDP_ERR_USAGE)
        fsdp_error_prefix(err, "'%s'",
                          fsdp_printable(entry->name, entry->name_size, shown, sizeof shown));
    return st;
}

/* quantization_config.weight_block_size; anything else leaves the sizes unknown. */
static void read_blocks(fsdp_json *json, int64_t block[2])
{
    const char *key;
    size_t size;
    bool more;
    if (fsdp_json_enter_object(json, NULL) != FSDP_OK)
        return;
    while (fsdp_json_next_key(json, &key, &size, &more, NULL) == FSDP_OK && more) {
        bool is_it = fsdp_bytes_are(key, size, "weight_block_size") &&
                     fsdp_json_peek(json) == FSDP_JSON_ARRAY;
        if (!is_it) {
            if (fsdp_json_skip(json, NULL) != FSDP_OK)
                return;
            continue;
        }
        if (fsdp_json_enter_array(json, NULL) != FSDP_OK)
            return;
        for (int i = 0; fsdp_json_next_item(json, &more, NULL) == FSDP_OK && more; i++)
            if (fsdp_json_i64(json, i < 2 ? &block[i] : &(int64_t){0}, NULL) != FSDP_OK)
                return;
    }
}

static void read_config(dequant_job *job)
{
    const char *key;
    size_t size;
    bool more;
    fsdp_json json;
    fsdp_json_init(&json, job->opts->config, job->opts->config_size, "config.json");
    fsdp_status st = fsdp_json_enter_object(&json, NULL);
    while (st == FSDP_OK && fsdp_json_next_key(&json, &key, &size, &more, NULL) == FSDP_OK &&
           more) {
        bool is_it = fsdp_bytes_are(key, size, "quantization_config") &&
                     fsdp_json_peek(&json) == FSDP_JSON_OBJECT;
        if (is_it)
            read_blocks(&json, job->block);
        st = is_it ? FSDP_DIFFERS : fsdp_json_skip(&json, NULL);
    }
    fsdp_json_release(&json);
}

fsdp_status fsdp_dequantize(const fsdp_dequant_opts *opts, fsdp_checkpoint **checkpoint,
                            fsdp_dequant_report *report_out, fsdp_error *err)
{
    dequant_job job = {.opts = opts, .base = *checkpoint, .sd = (*checkpoint)->manifest.sd};
    *checkpoint = NULL;
    if (opts->config)
        read_config(&job);
    FSDP_TRY(fsdp_derivation_begin(job.base, &job.derivation, err));
    fsdp_status st = fsdp_derivation_note_file(job.derivation, opts->config_path, err);
    for (size_t i = 0; i < fsdp_sd_count(job.sd) && st == FSDP_OK; i++)
        st = add_entry(&job, i, err);
    if (st == FSDP_OK && job.report.weights == 0)
        st =
            fsdp_fail(err, FSDP_ERR_USAGE,
                      "'%s' has no quantized weights that --dequant knows: fp8 with scales, MXFP4, "
                      "blocks of GGUF",
                      job.base->path);
    *report_out = job.report;
    if (st == FSDP_OK)
        return fsdp_derivation_finish(job.derivation, checkpoint, err);
    fsdp_derivation_cancel(job.derivation);
    return st;
}
