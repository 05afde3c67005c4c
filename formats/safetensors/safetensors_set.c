/*
 * Numbered safetensors files without an index: MODEL-00002-of-00003.safetensors states that there
 * are three. Nothing else lists the tensors of a missing file, so all files must exist.
 * safetensors_read.c calls this check.
 */
#include "formats/safetensors/safetensors.h"

#include "base/core/mem.h"
#include "formats/source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIGITS = 6, MOST_FILES = 1000000 };
static const char suffix[] = ".safetensors";

/* The number of digits that end at `end`. */
static size_t digits_before(const char *name, size_t end)
{
    size_t size = 0;
    while (size < end && size < MOST_DIGITS && name[end - size - 1] >= '0' &&
           name[end - size - 1] <= '9')
        size++;
    return size;
}

static bool parse(const char *name, fsdp_file_set *set_out, int *number_out)
{
    static const char of[] = "-of-";
    size_t size = strlen(name), end = sizeof suffix - 1, of_size = sizeof of - 1;
    if (size <= end || strcmp(name + size - end, suffix) != 0)
        return false;
    size_t at = size - end, total = digits_before(name, at);
    at -= total;
    if (total == 0 || at < of_size || memcmp(name + at - of_size, of, of_size) != 0)
        return false;
    size_t count = digits_before(name, at - of_size), stem = at - of_size - count;
    if (count == 0 || stem == 0 || name[stem - 1] != '-')
        return false;
    *set_out = (fsdp_file_set){name, stem - 1, (int)count, atoi(name + at)};
    *number_out = atoi(name + stem);
    return true;
}

bool fsdp_source_is_part(const char *path, int *number_out, int *count_out)
{
    const char *slash = strrchr(path, '/');
    fsdp_file_set set;
    if (!parse(slash ? slash + 1 : path, &set, number_out))
        return false;
    *count_out = set.count;
    return true;
}

/* The ranks of DCP write one set together: shard-00001-model-00002-of-00003.safetensors. A rank
 * without data for a file number writes no file. */
static void without_rank(fsdp_file_set *set)
{
    static const char shard[] = "shard-";
    size_t size = sizeof shard - 1, digits;
    if (set->stem_size <= size || strncmp(set->stem, shard, size) != 0)
        return;
    digits = strspn(set->stem + size, "0123456789");
    if (digits > 0 && size + digits + 1 < set->stem_size && set->stem[size + digits] == '-') {
        set->stem += size + digits + 1;
        set->stem_size -= size + digits + 1;
    }
}

bool fsdp_file_sets_are_one(const fsdp_file_set *a, const fsdp_file_set *b)
{
    return a->count == b->count && a->stem_size == b->stem_size &&
           memcmp(a->stem, b->stem, a->stem_size) == 0;
}

void fsdp_file_set_of(const char *name, fsdp_file_set *set_out)
{
    int number;
    if (parse(name, set_out, &number) && set_out->count > 0) {
        without_rank(set_out);
        return;
    }
    size_t size = strlen(name), end = sizeof suffix - 1;
    *set_out = (fsdp_file_set){.stem = name, .stem_size = size > end ? size - end : 0};
}

/* Marks the numbers of existing files. Numbering begins with 1, or with 0. */
static void mark_files(const fsdp_file_set *set, const char *const *names, size_t count,
                       bool *is_there)
{
    for (size_t i = 0; i < count; i++) {
        fsdp_file_set other;
        int number;
        if (!parse(names[i], &other, &number))
            continue;
        without_rank(&other);
        if (fsdp_file_sets_are_one(set, &other) && number <= set->count)
            is_there[number] = true;
    }
}

static fsdp_status check_set(const char *directory, const char *first, const fsdp_file_set *set,
                             const char *const *names, size_t count, fsdp_error *err)
{
    bool *is_there = fsdp_alloc((size_t)set->count + 1, sizeof *is_there);
    if (!is_there)
        return fsdp_fail_memory(err, directory);
    mark_files(set, names, count, is_there);
    int start = is_there[0] ? 0 : 1, missing = start;
    while (missing < start + set->count && is_there[missing])
        missing++;
    fsdp_free(is_there);
    if (missing == start + set->count)
        return FSDP_OK;
    fsdp_file_set written;
    int number;
    (void)parse(first, &written, &number);
    return fsdp_fail(err, FSDP_ERR_DAMAGED,
                     "'%s' says that there are %d files, and '%s/%.*s-%0*d-of-%s' is not there; "
                     "without an index its tensors are unknown: add it, or name single files",
                     first, set->count, directory, (int)written.stem_size, written.stem,
                     written.digits, missing,
                     first + written.stem_size + 1 + (size_t)written.digits + 4);
}

fsdp_status fsdp_safetensors_check_one(const char *name, const char *const *names, size_t count,
                                       fsdp_error *err)
{
    fsdp_file_set set;
    int number;
    if (!parse(name, &set, &number) || set.count < 1 || set.count > MOST_FILES)
        return FSDP_OK;
    without_rank(&set);
    return check_set("", name, &set, names, count, err);
}

fsdp_status fsdp_safetensors_check_set(const char *directory, const char *const *names,
                                       size_t count, fsdp_error *err)
{
    fsdp_file_set set, last = {0};
    int number;
    for (size_t i = 0; i < count; i++) {
        if (!parse(names[i], &set, &number) || set.count < 1 || set.count > MOST_FILES)
            continue;
        without_rank(&set);
        if (last.stem && fsdp_file_sets_are_one(&set, &last))
            continue; /* names are sorted, so a set is mostly contiguous */
        FSDP_TRY(check_set(directory, names[i], &set, names, count, err));
        last = set;
    }
    return FSDP_OK;
}
