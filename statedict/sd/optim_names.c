/* Distinguishes optimizer state from model state by the names that frameworks use: see sd.h. */
#include <fsdp/sd.h>

#include <string.h>

/* The name's first element is `element`. */
static bool begins_with(const fsdp_entry *entry, const char *element)
{
    size_t size = strlen(element);
    return entry->name_size >= size && memcmp(entry->name, element, size) == 0 &&
           (entry->name_size == size || entry->name[size] == '.');
}

bool fsdp_sd_state_is_optim(const fsdp_sd *sd)
{
    if (!sd)
        return false;
    bool state = false, groups = false;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        state = state || begins_with(fsdp_sd_at(sd, i), "state");
        groups = groups || begins_with(fsdp_sd_at(sd, i), "param_groups");
    }
    return state && groups;
}

bool fsdp_entry_is_optim(const fsdp_entry *entry, bool state_is_optim)
{
    if (!entry)
        return false;
    static const char *const tops[] = {"optim", "optimizer", "optimizers", "opt",
                                       "optimizer_state_dict"};
    for (size_t i = 0; i < sizeof tops / sizeof *tops; i++)
        if (begins_with(entry, tops[i]))
            return true;
    return state_is_optim && (begins_with(entry, "state") || begins_with(entry, "param_groups"));
}
