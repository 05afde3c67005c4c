/*
 * A directory of safetensors files may hold several models: variants ("model.fp16"), the same weights
 * once more for another program ("consolidated"), an adapter next to its base. This file chooses the one
 * that is read: by the index, by --variant, or by the name that loaders look for first.
 */
#include "formats/safetensors/safetensors.h"
#include "base/core/mem.h"
#include "base/text.h"
#include "formats/source.h"

#include <stdlib.h>
#include <string.h>

/* === sets of files ============================================================================ */

/*
 * Numbered safetensors files without an index: MODEL-00002-of-00003.safetensors states that there
 * are three. Nothing else lists the tensors of a missing file, so all files must exist.
 */

/* Numbered files with the same name otherwise, or one file (count 0). */
typedef struct fsdp_file_set {
    const char *stem; /* the text before "-00002-of-00003.safetensors", or before ".safetensors" */
    size_t stem_size;
    int digits, count;
} fsdp_file_set;

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

static bool file_sets_are_one(const fsdp_file_set *a, const fsdp_file_set *b)
{
    return a->count == b->count && a->stem_size == b->stem_size &&
           memcmp(a->stem, b->stem, a->stem_size) == 0;
}

/* The set that a file with the suffix ".safetensors" belongs to; the files of DCP's ranks are one. */
static void file_set_of(const char *name, fsdp_file_set *set_out)
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
        if (file_sets_are_one(set, &other) && number <= set->count)
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
                     "'%s' says that there are %d files, but '%s/%.*s-%0*d-of-%s' is missing; "
                     "without an index its tensors are unknown; add it, or name single files",
                     first, set->count, directory, (int)written.stem_size, written.stem,
                     written.digits, missing,
                     first + written.stem_size + 1 + (size_t)written.digits + 4);
}

/* FSDP_ERR_DAMAGED: the name is of a set of files ("-00001-of-00002"), and one of them is not there. */
static fsdp_status safetensors_check_one(const char *name, const char *const *names, size_t count,
                                         fsdp_error *err)
{
    fsdp_file_set set;
    int number;
    if (!parse(name, &set, &number) || set.count < 1 || set.count > MOST_FILES)
        return FSDP_OK;
    without_rank(&set);
    return check_set("", name, &set, names, count, err);
}

static fsdp_status check_sets(const char *directory, const char *const *names, size_t count,
                              fsdp_error *err)
{
    fsdp_file_set set, last = {0};
    int number;
    for (size_t i = 0; i < count; i++) {
        if (!parse(names[i], &set, &number) || set.count < 1 || set.count > MOST_FILES)
            continue;
        without_rank(&set);
        if (last.stem && file_sets_are_one(&set, &last))
            continue; /* names are sorted, so a set is mostly contiguous */
        FSDP_TRY(check_set(directory, names[i], &set, names, count, err));
        last = set;
    }
    return FSDP_OK;
}

/* === the choice =============================================================================== */

static const char index_suffix[] = ".safetensors.index.json";

/* Stems in the order in which loaders look for them. */
static const char *const usual_stems[] = {"model", "diffusion_pytorch_model", "pytorch_model",
                                          "adapter_model", "adapters"};
enum { USUAL_STEMS = sizeof usual_stems / sizeof *usual_stems, NAMES_SHOWN = 6 };

static bool is_stem(const fsdp_file_set *set, const char *stem, size_t size)
{
    return set->stem_size == size && memcmp(set->stem, stem, size) == 0;
}

/* --- variants --------------------------------------------------------------------------------- */

/* True for "STEM.VARIANT" when the directory holds STEM, too. */
static bool is_variant_of(const fsdp_file_set *set, const fsdp_file_set *plain)
{
    return set->stem_size > plain->stem_size + 1 && set->stem[plain->stem_size] == '.' &&
           memcmp(set->stem, plain->stem, plain->stem_size) == 0;
}

static bool has_variant(const fsdp_file_set *set, const char *variant, size_t size)
{
    return set->stem_size > size + 1 &&
           memcmp(set->stem + set->stem_size - size, variant, size) == 0 &&
           set->stem[set->stem_size - size - 1] == '.';
}

/* The variant in "model.safetensors.index.fp16.json"; NULL: it is not the index of one. */
static const char *variant_of_index(const char *name, size_t *size_out)
{
    static const char middle[] = ".safetensors.index.", end[] = ".json";
    const char *at = strstr(name, middle);
    if (!at || at == name || !fsdp_has_suffix(at + sizeof middle - 1, end))
        return NULL;
    at += sizeof middle - 1;
    *size_out = strlen(at) - (sizeof end - 1);
    return at;
}

/* "model.safetensors.index.json", and "model.safetensors.index.fp16.json" for a variant. */
static bool is_index_of(const char *name, const char *variant)
{
    size_t size = 0;
    const char *own = variant_of_index(name, &size);
    return variant ? own && fsdp_bytes_are(own, size, variant)
                   : fsdp_has_suffix(name, index_suffix);
}

/* --- indexes ---------------------------------------------------------------------------------- */

static int rank_of_index(const char *name)
{
    for (int i = 0; i < USUAL_STEMS; i++) {
        size_t size = strlen(usual_stems[i]);
        if (strncmp(name, usual_stems[i], size) == 0 &&
            strncmp(name + size, ".safetensors.index.", 19) == 0)
            return i;
    }
    return USUAL_STEMS;
}

/* True when files without the variant in their names are a whole model: one file, or as many as the names
 * count. */
static fsdp_status has_plain_model(const fsdp_probe *probe, const char *variant, size_t size,
                                   bool *has_out, fsdp_error *err)
{
    *has_out = false;
    for (size_t i = 0; i < probe->name_count && !*has_out; i++) {
        fsdp_error why = {0};
        fsdp_file_set set;
        if (!fsdp_has_suffix(probe->names[i], suffix))
            continue;
        file_set_of(probe->names[i], &set);
        if (has_variant(&set, variant, size))
            continue;
        fsdp_status st =
            safetensors_check_one(probe->names[i], probe->names, probe->name_count, &why);
        if (st != FSDP_OK && st != FSDP_ERR_DAMAGED)
            return fsdp_fail_memory(err, probe->path);
        *has_out = st == FSDP_OK;
    }
    return FSDP_OK;
}

/* The only index of a directory may be a variant's. It counts unless there is a whole model without one: a
 * part of one is left of a download. */
static fsdp_status choose_variant(const fsdp_probe *probe, const char **name_out, fsdp_error *err)
{
    const char *only = NULL, *variant = NULL;
    size_t size = 0;
    bool has_plain;
    for (size_t i = 0; i < probe->name_count; i++) {
        size_t own_size;
        const char *own = variant_of_index(probe->names[i], &own_size);
        if (own && only)
            return FSDP_OK; /* the files decide, or --variant */
        if (own)
            only = probe->names[i], variant = own, size = own_size;
    }
    if (!only)
        return FSDP_OK;
    FSDP_TRY(has_plain_model(probe, variant, size, &has_plain, err));
    *name_out = has_plain ? NULL : only;
    return FSDP_OK;
}

fsdp_status fsdp_safetensors_choose_index(const fsdp_probe *probe, const char **name_out,
                                          fsdp_error *err)
{
    const char *variant = probe->opts ? probe->opts->variant : NULL, *other = NULL;
    *name_out = NULL;
    for (size_t i = 0; i < probe->name_count; i++) {
        const char *name = probe->names[i];
        if (!is_index_of(name, variant))
            continue;
        if (!*name_out || rank_of_index(name) < rank_of_index(*name_out)) {
            *name_out = name;
            other = NULL;
        } else if (rank_of_index(name) == rank_of_index(*name_out))
            other = name;
    }
    if (!*name_out && !variant)
        return choose_variant(probe, name_out, err);
    if (!other)
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "'%s' holds several models ('%s', '%s'); put one into a directory of its own",
                     probe->path, *name_out, other);
}

/* --- files without an index -------------------------------------------------------------------- */

typedef struct candidate {
    fsdp_file_set set;
    const char *first; /* the name of its first file */
    bool is_out;
} candidate;

typedef struct choosing {
    const fsdp_probe *probe;
    candidate *items;
    size_t count, room;
} choosing;

/* Names that differ only in a number are parts of one model: weights.00.safetensors, rank-1. */
static bool differ_by_number(const fsdp_file_set *a, const fsdp_file_set *b)
{
    static const char digits[] = "0123456789";
    const char *x = a->stem, *y = b->stem, *x_end = x + a->stem_size, *y_end = y + b->stem_size;
    while (x < x_end && y < y_end && *x == *y)
        x++, y++;
    while (x > a->stem && strchr(digits, x[-1]) && x[-1])
        x--, y--;
    size_t x_digits = strspn(x, digits), y_digits = strspn(y, digits);
    x += x_digits;
    y += y_digits;
    return x_digits > 0 && y_digits > 0 && x <= x_end && y <= y_end && x_end - x == y_end - y &&
           memcmp(x, y, (size_t)(x_end - x)) == 0;
}

static bool is_same_model(const fsdp_file_set *a, const fsdp_file_set *b)
{
    return file_sets_are_one(a, b) ||
           (a->count == b->count && !is_stem(a, b->stem, b->stem_size) && differ_by_number(a, b));
}

static fsdp_status list_models(choosing *choice, fsdp_error *err)
{
    for (size_t i = 0; i < choice->probe->name_count; i++) {
        const char *name = choice->probe->names[i];
        candidate item = {.first = name};
        size_t at = 0;
        if (!fsdp_has_suffix(name, suffix))
            continue;
        file_set_of(name, &item.set);
        while (at < choice->count && !is_same_model(&choice->items[at].set, &item.set))
            at++;
        if (at < choice->count)
            continue;
        if (!fsdp_grow(&choice->items, &choice->room, choice->count + 1, sizeof item))
            return fsdp_fail_memory(err, choice->probe->path);
        choice->items[choice->count++] = item;
    }
    return FSDP_OK;
}

static size_t keep_only(choosing *choice, bool (*is_kept)(const candidate *, const void *),
                        const void *what)
{
    size_t left = 0;
    for (size_t i = 0; i < choice->count; i++)
        left += !choice->items[i].is_out && is_kept(&choice->items[i], what);
    for (size_t i = 0; left > 0 && i < choice->count; i++)
        choice->items[i].is_out = choice->items[i].is_out || !is_kept(&choice->items[i], what);
    return left;
}

static bool has_this_variant(const candidate *item, const void *variant)
{
    return has_variant(&item->set, variant, strlen(variant));
}

static bool has_this_stem(const candidate *item, const void *stem)
{
    return is_stem(&item->set, stem, strlen(stem));
}

static bool is_one_file(const candidate *item, const void *nothing)
{
    (void)nothing;
    return item->set.count == 0;
}

static bool is_no_variant(const candidate *item, const void *all)
{
    const choosing *choice = all;
    for (size_t i = 0; i < choice->count; i++)
        if (is_variant_of(&item->set, &choice->items[i].set))
            return false;
    return true;
}

static size_t count_left(const choosing *choice)
{
    size_t left = 0;
    for (size_t i = 0; i < choice->count; i++)
        left += !choice->items[i].is_out;
    return left;
}

/* Each rule leaves at least one model. */
static size_t narrow(choosing *choice)
{
    for (int i = 0; i < USUAL_STEMS && count_left(choice) > 1; i++)
        if (keep_only(choice, has_this_stem, usual_stems[i]) > 0)
            break;
    if (count_left(choice) > 1)
        keep_only(choice, is_no_variant, choice);
    if (count_left(choice) > 1)
        keep_only(choice, is_one_file, NULL);
    return count_left(choice);
}

static void list_names(const choosing *choice, bool all, fsdp_text *text)
{
    size_t shown = 0;
    for (size_t i = 0; i < choice->count; i++) {
        char name[120];
        if (!all && choice->items[i].is_out)
            continue;
        if (shown++ == NAMES_SHOWN) {
            fsdp_text_addf(text, ", ...");
            break;
        }
        fsdp_printable(choice->items[i].first, strlen(choice->items[i].first), name, sizeof name);
        fsdp_text_addf(text, "%s'%s'", shown > 1 ? ", " : "", name);
    }
}

static fsdp_status fail_choice(const choosing *choice, const char *variant, fsdp_error *err)
{
    fsdp_text names = {0};
    list_names(choice, variant != NULL, &names);
    fsdp_status st;
    if (names.failed)
        st = fsdp_fail_memory(err, choice->probe->path);
    else if (variant)
        st = fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds no variant '%s': it holds %s",
                       choice->probe->path, variant, names.size ? names.data : "no weights");
    else
        st = fsdp_fail(err, FSDP_ERR_USAGE,
                       "'%s' holds several models and no index that names one: %s; name one of "
                       "these files",
                       choice->probe->path, names.data);
    fsdp_text_release(&names);
    return st;
}

fsdp_status fsdp_safetensors_choose_files(const fsdp_probe *probe, const char **names_out,
                                          size_t *count_out, fsdp_error *err)
{
    *count_out = 0;
    choosing choice = {.probe = probe};
    const char *variant = probe->opts ? probe->opts->variant : NULL;
    fsdp_status st = list_models(&choice, err);
    if (st == FSDP_OK && variant && keep_only(&choice, has_this_variant, variant) == 0)
        st = fail_choice(&choice, variant, err);
    if (st == FSDP_OK && choice.count > 0 && narrow(&choice) > 1)
        st = fail_choice(&choice, NULL, err);
    for (size_t i = 0, at = 0; i < probe->name_count && st == FSDP_OK; i++) {
        fsdp_file_set set;
        if (!fsdp_has_suffix(probe->names[i], suffix))
            continue;
        file_set_of(probe->names[i], &set);
        for (at = 0; choice.items[at].is_out; at++)
            ;
        if (is_same_model(&choice.items[at].set, &set))
            names_out[(*count_out)++] = probe->names[i];
    }
    fsdp_free(choice.items);
    return st == FSDP_OK ? check_sets(probe->path, names_out, *count_out, err) : st;
}
