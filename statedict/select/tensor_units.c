/* Finds tensors of subclasses and their members: see tensor_units.h. */
#include "statedict/select/tensor_units.h"

#include "base/core/mem.h"
#include "base/data/name_path.h"
#include "statedict/select/tensor_kinds.h"

#include <string.h>

/* --- finding ---------------------------------------------------------------------------------- */

/* The end of the element of a name after `begin`: of a key where nesting is known, else the next dot. */
static size_t end_of_element(const fsdp_entry *entry, size_t number, size_t begin)
{
    if (entry->path)
        return number < entry->path_count ? begin + fsdp_path_bytes(entry->path[number])
                                          : entry->name_size;
    const char *dot = memchr(entry->name + begin, '.', entry->name_size - begin);
    return dot ? (size_t)(dot - entry->name) : entry->name_size;
}

/* The tensor of a subclass in which the entry is, -1 for none. A subclass may hold a second one: the outer
 * one counts. */
static int64_t find_unit(const fsdp_sd *sd, const bool *are_units, const fsdp_entry *entry)
{
    size_t end = end_of_element(entry, 0, 0);
    for (size_t number = 1; end < entry->name_size; number++) {
        int64_t found = fsdp_sd_find(sd, entry->name, end);
        if (found >= 0 && are_units[found])
            return found;
        end = end_of_element(entry, number, end + 1);
    }
    return -1;
}

static void join_units(const fsdp_sd *sd, const bool *are_units, fsdp_selected *selected)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        int64_t unit = find_unit(sd, are_units, fsdp_sd_at(sd, i));
        if (unit < 0)
            continue;
        selected[unit].unit = selected[i].unit = (size_t)unit + 1;
        selected[i].kind = selected[unit].kind;
    }
}

fsdp_status fsdp_units_find(const fsdp_sd *sd, fsdp_selected *selected, fsdp_error *err)
{
    bool has_units = false;
    bool *are_units = fsdp_alloc(fsdp_sd_count(sd), sizeof *are_units);
    if (!are_units)
        return fsdp_fail_memory(err, "a selection");
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        selected[i].kind = fsdp_tensor_kind(fsdp_sd_at(sd, i), &are_units[i]);
        has_units = has_units || are_units[i];
    }
    if (has_units)
        join_units(sd, are_units, selected);
    fsdp_free(are_units);
    return FSDP_OK;
}

/* --- checking --------------------------------------------------------------------------------- */

static fsdp_status fail_part(const fsdp_sd *sd, size_t unit, size_t member, bool is_kept,
                             fsdp_error *err)
{
    const fsdp_entry *whole = fsdp_sd_at(sd, unit), *part = fsdp_sd_at(sd, member);
    char name[160], other[160];
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' is one tensor of a subclass, and its part '%s' is %s: patterns take all "
                     "of it, or nothing; to get its numbers alone, save it as a plain tensor in "
                     "Python",
                     fsdp_printable(whole->name, whole->name_size, name, sizeof name),
                     fsdp_printable(part->name, part->name_size, other, sizeof other),
                     is_kept ? "taken without the rest" : "left out");
}

fsdp_status fsdp_units_check(const fsdp_sd *sd, const fsdp_selected *selected, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        size_t unit = selected[i].unit - 1;
        if (fsdp_unit_has_member(selected, i) && selected[i].is_kept != selected[unit].is_kept)
            return fail_part(sd, unit, i, selected[i].is_kept, err);
    }
    return FSDP_OK;
}
