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

/* Up to a dot; or up to a slash, which separates the groups of an HDF5 file. */
static size_t element_size(const char *text, size_t size)
{
    size_t n = 0;
    while (n < size && text[n] != '.' && text[n] != '/')
        n++;
    return n;
}

/* "optimizer_0", "optimizer_states", "optim_rank1": further spellings of the first element. */
static bool is_optim_word(const char *text, size_t size)
{
    static const char *const words[] = {"optim",
                                        "optimizer",
                                        "optimizers",
                                        "opt",
                                        "optimizer_state_dict",
                                        "optimizer_states",
                                        "optimizer_state",
                                        "optimizer_weights",
                                        "optim_state_dict",
                                        "optim_state"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strlen(words[i]) == size && memcmp(text, words[i], size) == 0)
            return true;
    size_t digits = size;
    while (digits > 0 && text[digits - 1] >= '0' && text[digits - 1] <= '9')
        digits--;
    return digits < size && ((digits == 10 && memcmp(text, "optimizer_", 10) == 0) ||
                             (digits == 6 && memcmp(text, "optim_", 6) == 0));
}

/* "0.state.0.exp_avg" or "0.param_groups.0.lr": of a list of optimizers. */
static bool is_in_list(const fsdp_entry *entry)
{
    size_t digits = 0;
    while (digits < entry->name_size && entry->name[digits] >= '0' && entry->name[digits] <= '9')
        digits++;
    if (digits == 0 || digits == entry->name_size || entry->name[digits] != '.')
        return false;
    const fsdp_entry inner = {.name = entry->name + digits + 1,
                              .name_size = entry->name_size - digits - 1};
    return begins_with(&inner, "state") || begins_with(&inner, "param_groups");
}

bool fsdp_sd_state_is_optim(const fsdp_sd *sd)
{
    if (!sd)
        return false;
    bool state = false, groups = false, is_list = fsdp_sd_count(sd) > 0;
    for (size_t i = 0; i < fsdp_sd_count(sd); i++) {
        state = state || begins_with(fsdp_sd_at(sd, i), "state");
        groups = groups || begins_with(fsdp_sd_at(sd, i), "param_groups");
        is_list = is_list && is_in_list(fsdp_sd_at(sd, i));
    }
    return (state && groups) || is_list;
}

bool fsdp_entry_is_optim(const fsdp_entry *entry, bool state_is_optim)
{
    if (!entry)
        return false;
    const char *name = entry->name;
    size_t left = entry->name_size, size = element_size(name, left);
    if (size == 3 && size < left && memcmp(name, "app.", 4) == 0) { /* DCP's Stateful around all */
        name += size + 1;
        left -= size + 1;
        size = element_size(name, left);
    }
    if (is_optim_word(name, size))
        return true;
    return state_is_optim &&
           (begins_with(entry, "state") || begins_with(entry, "param_groups") || is_in_list(entry));
}
