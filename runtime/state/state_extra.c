/*
 * The caller's extra entries beside the state of a root: root_state.c saves and loads them with it. See
 * state.h, "checkpoints".
 */
#include "runtime/state/state_internal.h"
#include "statedict/sd/layout_internal.h"

static fsdp_status add_extra(const fsdp_sd *extra, const fsdp_entry *entry, fsdp_sd *sd,
                             fsdp_error *err)
{
    if (entry->flat >= 0)
        return fsdp_fail(
            err, FSDP_ERR_USAGE,
            "'%s' lies in a flat buffer, which extra entries cannot: add it as a tensor",
            entry->name);
    return fsdp_state_add_entry(extra, entry, &entry->layout, entry->data, sd, err);
}

fsdp_status fsdp_state_save_extra(const fsdp_sd *extra, fsdp_sd *sd, fsdp_error *err)
{
    for (size_t i = 0; extra && i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        FSDP_TRY(add_extra(extra, entry, sd, err));
        if (entry->path)
            FSDP_TRY(
                fsdp_sd_set_path(sd, fsdp_sd_count(sd) - 1, entry->path, entry->path_count, err));
    }
    return FSDP_OK;
}

/* Aliases are skipped, because their target is loaded. */
fsdp_status fsdp_state_want_extra(fsdp_sd *extra, const fsdp_sd *stored, int rank, fsdp_sd *wanted,
                                  fsdp_error *err)
{
    if (!extra)
        return FSDP_OK;
    FSDP_TRY(fsdp_sd_allocate(extra, rank, err));
    for (size_t i = 0; i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        bool is_stored = fsdp_sd_find(stored, entry->name, entry->name_size) >= 0;
        if (entry->kind != FSDP_ENTRY_ALIAS && is_stored)
            FSDP_TRY(add_extra(extra, entry, wanted, err));
    }
    return FSDP_OK;
}

/* Copies values only: tensors were loaded into their memory. */
fsdp_status fsdp_state_take_extra(fsdp_sd *extra, const fsdp_sd *loaded, fsdp_error *err)
{
    for (size_t i = 0; extra && i < fsdp_sd_count(extra); i++) {
        const fsdp_entry *entry = fsdp_sd_at(extra, i);
        int64_t at = fsdp_sd_find(loaded, entry->name, entry->name_size);
        fsdp_value value = {0};
        if (entry->kind != FSDP_ENTRY_VALUE || at < 0)
            continue;
        FSDP_TRY(fsdp_value_copy(&fsdp_sd_at(loaded, (size_t)at)->value, &value, err));
        fsdp_sd_set_value(extra, i, &value);
    }
    return FSDP_OK;
}
