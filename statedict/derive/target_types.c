/* Blocks and vectors as the target needs them: see target_types.h. */
#include "statedict/derive/target_types.h"

#include "statedict/derive/derived_checkpoint.h"
#include "statedict/select/selection.h"
#include "statedict/select/vectors.h"

#include <string.h>

typedef enum type_change { CHANGE_NONE, CHANGE_DECODE, CHANGE_ENCODE, CHANGE_WIDEN } type_change;

static bool is_float(const fsdp_entry *entry)
{
    return fsdp_dtype_describe(entry->dtype)->is_float;
}

static bool is_matrix_of_blocks(const fsdp_entry *entry, fsdp_dtype blocks)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(blocks);
    return info && is_float(entry) && !fsdp_is_vector(entry) &&
           entry->shape[entry->ndim - 1] % (int64_t)info->values == 0;
}

static type_change change_of(const fsdp_target_types *types, const fsdp_entry *entry,
                             bool state_is_optim)
{
    const fsdp_format *target = types->target;
    if (entry->kind != FSDP_ENTRY_TENSOR || fsdp_entry_is_optim(entry, state_is_optim))
        return CHANGE_NONE;
    if (fsdp_dtype_describe(entry->dtype)->values > 1)
        return !target->writer->holds_dtype(entry->dtype) ? CHANGE_DECODE : CHANGE_NONE;
    bool has_rule = types->casts && fsdp_cast_rules_have(types->casts, entry);
    if (is_matrix_of_blocks(entry, types->blocks) && !has_rule)
        return CHANGE_ENCODE;
    bool is_f32 = target->caps.f32_weights ||
                  (target->caps.f32_vectors && fsdp_is_vector(entry) && entry->dtype != FSDP_F64);
    return is_f32 && is_float(entry) && entry->dtype != FSDP_F32 ? CHANGE_WIDEN : CHANGE_NONE;
}

static fsdp_status add_changed(const fsdp_target_types *types, type_change change,
                               fsdp_derivation *derivation, size_t number, fsdp_error *err)
{
    fsdp_checkpoint *base = fsdp_derivation_base(derivation);
    fsdp_arena *arena = fsdp_derivation_arena(derivation);
    const fsdp_entry *entry = fsdp_sd_at(base->manifest.sd, number);
    const fsdp_derived *tensor = NULL;
    FSDP_TRY(fsdp_derive_stored(arena, base, number, &tensor, err));
    if (change == CHANGE_DECODE)
        FSDP_TRY(fsdp_derive_values(arena, tensor, &tensor, err));
    else if (change == CHANGE_ENCODE)
        FSDP_TRY(fsdp_derive_blocks(arena, tensor, types->blocks, &tensor, err));
    else
        FSDP_TRY(fsdp_derive_cast(arena, tensor, FSDP_F32, &tensor, err));
    return fsdp_derivation_replace(derivation, number,
                                   (fsdp_derived_name){entry->name, entry->name_size}, tensor, err);
}

static fsdp_type_report count_changes(const fsdp_target_types *types, const fsdp_sd *sd)
{
    bool state_is_optim = fsdp_sd_state_is_optim(sd);
    fsdp_type_report report = {0};
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        type_change change = change_of(types, fsdp_sd_at(sd, i), state_is_optim);
        report.decoded += change == CHANGE_DECODE;
        report.encoded += change == CHANGE_ENCODE;
        report.widened += change == CHANGE_WIDEN;
    }
    return report;
}

fsdp_status fsdp_derive_target_types(const fsdp_target_types *types, fsdp_checkpoint **checkpoint,
                                     fsdp_type_report *report_out, fsdp_error *err)
{
    const fsdp_sd *sd = (*checkpoint)->manifest.sd;
    bool state_is_optim = fsdp_sd_state_is_optim(sd);
    fsdp_derivation *derivation = NULL;
    fsdp_checkpoint *base = *checkpoint;
    *report_out = count_changes(types, sd);
    if (report_out->decoded + report_out->encoded + report_out->widened == 0)
        return FSDP_OK;
    *checkpoint = NULL;
    FSDP_TRY(fsdp_derivation_begin(base, &derivation, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && st == FSDP_OK; i++) {
        type_change change = change_of(types, fsdp_sd_at(sd, i), state_is_optim);
        st = change ? add_changed(types, change, derivation, i, err)
                    : fsdp_derivation_keep(derivation, i, err);
    }
    if (st == FSDP_OK)
        return fsdp_derivation_finish(derivation, checkpoint, err);
    fsdp_derivation_cancel(derivation);
    return st;
}
