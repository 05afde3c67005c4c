/* Finds the groups of rank files in a directory by their names: see rank_names.h. */
#include "formats/source/rank_names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIGITS = 9 };

/* A run of digits in a name. */
typedef struct digits {
    size_t at, size;
} digits;

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static int number_of(const char *name, digits run)
{
    int number = 0;
    for (size_t i = 0; i < run.size; i++)
        number = number * 10 + (name[run.at + i] - '0');
    return number;
}

/* --- without a pattern -------------------------------------------------------------------------- */

static digits next_digits(const char *name, size_t from)
{
    digits run = {from, 0};
    while (name[run.at] != '\0' && !is_digit(name[run.at]))
        run.at++;
    while (is_digit(name[run.at + run.size]))
        run.size++;
    return run;
}

/* True when the digits follow the word, with at most one separator between them. */
static bool follows(const char *name, digits run, const char *word)
{
    size_t size = strlen(word), end = run.at;
    if (end > 0 && strchr("_-.=", name[end - 1]))
        end--;
    if (end < size)
        return false;
    for (size_t i = 0; i < size; i++)
        if (lower(name[end - size + i]) != word[i])
            return false;
    return true;
}

static bool is_world(const char *name, digits run)
{
    static const char *const words[] = {"world_size", "worldsize", "world-size",
                                        "world",      "_of",       "-of"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (follows(name, run, words[i]))
            return true;
    return false;
}

/* The rank: the number after the word "rank", or the last number that is not the world; size 0:
 * none. */
static digits find_rank(const char *name, bool *says_rank_out)
{
    digits found = {0, 0};
    *says_rank_out = false;
    for (digits run = next_digits(name, 0); run.size > 0;
         run = next_digits(name, run.at + run.size)) {
        bool says_rank = follows(name, run, "rank");
        if (run.size > MOST_DIGITS || is_world(name, run) || (*says_rank_out && !says_rank))
            continue;
        found = run;
        *says_rank_out = says_rank;
    }
    return found;
}

static digits find_world(const char *name, digits rank)
{
    for (digits run = next_digits(name, 0); run.size > 0;
         run = next_digits(name, run.at + run.size))
        if (run.at != rank.at && run.size <= MOST_DIGITS && is_world(name, run))
            return run;
    return (digits){0, 0};
}

/* --- with a pattern ----------------------------------------------------------------------------- */

static bool matches(const char *pattern, const char *name, digits *rank, digits *world)
{
    size_t at = 0;
    while (*pattern != '\0') {
        bool is_rank = strncmp(pattern, "{r}", 3) == 0;
        if (!is_rank && strncmp(pattern, "{W}", 3) != 0) {
            if (name[at++] != *pattern++)
                return false;
            continue;
        }
        digits run = {at, strspn(name + at, "0123456789")};
        if (run.size == 0 || run.size > MOST_DIGITS)
            return false;
        *(is_rank ? rank : world) = run;
        at += run.size;
        pattern += 3;
    }
    return name[at] == '\0';
}

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++)
        count++;
    return count;
}

static fsdp_status check_pattern(const char *pattern, fsdp_error *err)
{
    if (count_of(pattern, "{r}") != 1 || count_of(pattern, "{W}") > 1)
        return fsdp_fail(err, FSDP_ERR_USAGE,
                         "the pattern '%s' must hold {r}, the rank, once, and {W}, the world size, "
                         "at most once",
                         pattern);
    if (strstr(pattern, "{r}{W}") || strstr(pattern, "{W}{r}"))
        return fsdp_fail(err, FSDP_ERR_USAGE, "'%s': no text separates {r} from {W}", pattern);
    return FSDP_OK;
}

/* --- groups ------------------------------------------------------------------------------------- */

static fsdp_status find_group(rank_names *out, const char *name, digits rank, rank_group **group,
                              fsdp_error *err)
{
    size_t rest = strlen(name) - rank.at - rank.size, size = rank.at + 3 + rest;
    char *pattern = fsdp_arena_alloc(&out->arena, size + 1, 1);
    if (!pattern)
        return fsdp_fail_memory(err, "a list of files");
    snprintf(pattern, size + 1, "%.*s{r}%s", (int)rank.at, name, name + rank.at + rank.size);
    const uint64_t *known = fsdp_name_table_find(&out->table, pattern, size);
    if (known) {
        *group = &out->groups[*known];
        return FSDP_OK;
    }
    if (!fsdp_grow(&out->groups, &out->room, out->count + 1, sizeof *out->groups) ||
        !fsdp_name_table_put(&out->table, pattern, size, out->count))
        return fsdp_fail_memory(err, "a list of files");
    *group = &out->groups[out->count++];
    **group = (rank_group){.pattern = pattern, .stem = rank.at};
    return FSDP_OK;
}

static fsdp_status add_name(rank_names *out, const char *name, const char *pattern, fsdp_error *err)
{
    digits rank = {0, 0}, world = {0, 0};
    bool says_rank = true;
    if (pattern ? !matches(pattern, name, &rank, &world)
                : (rank = find_rank(name, &says_rank)).size == 0)
        return FSDP_OK;
    if (world.size == 0)
        world = find_world(name, rank);
    rank_group *group = NULL;
    FSDP_TRY(find_group(out, name, rank, &group, err));
    if (!fsdp_grow(&group->files, &group->room, group->count + 1, sizeof *group->files))
        return fsdp_fail_memory(err, "a list of files");
    group->world = world.size > 0 ? number_of(name, world) : 0;
    group->says_rank = says_rank;
    rank_file *file = &group->files[group->count++];
    *file = (rank_file){.rank = number_of(name, rank),
                        .name = fsdp_arena_strndup(&out->arena, name, strlen(name))};
    return file->name ? FSDP_OK : fsdp_fail_memory(err, "a list of files");
}

static int compare_files(const void *a, const void *b)
{
    const rank_file *x = a, *y = b;
    int order = (x->rank > y->rank) - (x->rank < y->rank);
    return order != 0 ? order : strcmp(x->name, y->name);
}

fsdp_status rank_names_group(const char *const *names, size_t count, const char *pattern,
                             rank_names *out, fsdp_error *err)
{
    *out = (rank_names){0};
    if (pattern)
        FSDP_TRY(check_pattern(pattern, err));
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < count && st == FSDP_OK; i++)
        st = add_name(out, names[i], pattern, err);
    for (size_t i = 0; i < out->count && st == FSDP_OK; i++)
        qsort(out->groups[i].files, out->groups[i].count, sizeof *out->groups[i].files,
              compare_files);
    if (st != FSDP_OK)
        rank_names_release(out);
    return st;
}

void rank_names_release(rank_names *names)
{
    for (size_t i = 0; i < names->count; i++)
        fsdp_free(names->groups[i].files);
    fsdp_free(names->groups);
    fsdp_name_table_release(&names->table);
    fsdp_arena_release(&names->arena);
    *names = (rank_names){0};
}
