/* The files of a tag by their names: see deepspeed.h. */
#include "formats/deepspeed/deepspeed.h"

#include <stdlib.h>
#include <string.h>

enum { NUMBERS = 3, MOST_DIGITS = 9 };

/* Names of files: '#' is a number. part, rank, layer: which number they are; -1: none. */
typedef struct file_pattern {
    const char *text;
    ds_file_kind kind;
    int part, rank, layer;
} file_pattern;

static const file_pattern patterns[] = {
    {"mp_rank_#_model_states.pt", DS_FILE_MODEL, 0, -1, -1},
    {"zero_pp_rank_#_mp_rank_#_model_states.pt", DS_FILE_MODEL, 1, 0, -1},
    {"zero_pp_rank_#_mp_rank_#_optim_states.pt", DS_FILE_OPTIM, 1, 0, -1},
    {"bf16_zero_pp_rank_#_mp_rank_#_optim_states.pt", DS_FILE_OPTIM, 1, 0, -1},
    {"layer_#-model_states.pt", DS_FILE_LAYER, -1, -1, 0},
    {"layer_#-model_#-model_states.pt", DS_FILE_LAYER, 1, -1, 0},
    {"layer_#_expert_#_mp_rank_#_model_states.pt", DS_FILE_EXPERT, 2, 1, 0},
    {"expp_rank_#_mp_rank_#_optim_states.pt", DS_FILE_EXPERT_OPTIM, 1, 0, -1},
};
enum { PATTERNS = sizeof patterns / sizeof *patterns };

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool matches(const char *name, const char *pattern, int numbers_out[NUMBERS])
{
    int found = 0;
    for (; *pattern != '\0'; pattern++) {
        if (*pattern != '#') {
            if (*name++ != *pattern)
                return false;
            continue;
        }
        int digits = 0, number = 0;
        for (; is_digit(*name) && digits < MOST_DIGITS; digits++)
            number = number * 10 + (*name++ - '0');
        if (digits == 0)
            return false;
        numbers_out[found++] = number;
    }
    return *name == '\0';
}

static bool recognise(const char *name, ds_file *file_out)
{
    int numbers[NUMBERS];
    for (int i = 0; i < PATTERNS; i++) {
        const file_pattern *pattern = &patterns[i];
        if (!matches(name, pattern->text, numbers))
            continue;
        *file_out = (ds_file){.name = name,
                              .kind = pattern->kind,
                              .part = pattern->part < 0 ? 0 : numbers[pattern->part],
                              .rank = pattern->rank < 0 ? -1 : numbers[pattern->rank],
                              .layer = pattern->layer < 0 ? 0 : numbers[pattern->layer]};
        return true;
    }
    return false;
}

static int compare_files(const void *a, const void *b)
{
    const ds_file *x = a, *y = b;
    const int64_t orders[] = {(int64_t)x->kind - (int64_t)y->kind, (int64_t)x->part - y->part,
                              (int64_t)x->layer - y->layer, (int64_t)x->rank - y->rank};
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++)
        if (orders[i] != 0)
            return orders[i] < 0 ? -1 : 1;
    return 0;
}

/* A run with bf16 and one without it may have left their files in the same tag. */
static fsdp_status check_twins(const ds_files *files, fsdp_error *err)
{
    for (size_t i = 1; i < files->count; i++)
        if (compare_files(&files->items[i - 1], &files->items[i]) == 0)
            return fsdp_fail(err, FSDP_ERR_DAMAGED, "'%s' and '%s' are of the same rank",
                             files->items[i - 1].name, files->items[i].name);
    return FSDP_OK;
}

fsdp_status ds_files_find(const char *const *names, size_t count, ds_files *files_out,
                          fsdp_error *err)
{
    *files_out = (ds_files){0};
    for (size_t i = 0; i < count; i++) {
        ds_file file;
        if (!recognise(names[i], &file))
            continue;
        if (!fsdp_grow(&files_out->items, &files_out->room, files_out->count + 1,
                       sizeof *files_out->items))
            return fsdp_fail_memory(err, "the files of a checkpoint");
        files_out->items[files_out->count++] = file;
    }
    if (files_out->count > 0)
        qsort(files_out->items, files_out->count, sizeof *files_out->items, compare_files);
    return check_twins(files_out, err);
}

void ds_files_release(ds_files *files)
{
    fsdp_free(files->items);
    *files = (ds_files){0};
}

const ds_file *ds_files_of(const ds_files *files, ds_file_kind kind, int part, size_t *count_out)
{
    const ds_file *first = NULL;
    *count_out = 0;
    for (size_t i = 0; i < files->count; i++) {
        const ds_file *file = &files->items[i];
        if (file->kind != kind || (part >= 0 && file->part != part))
            continue;
        first = first ? first : file;
        (*count_out)++;
    }
    return first;
}

fsdp_status ds_files_check_ranks(const ds_file *files, size_t count, const char *directory,
                                 fsdp_error *err)
{
    for (size_t i = 0; i < count; i++)
        if (files[i].rank != (int)i)
            return fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s': the file of rank %zu is missing before '%s'", directory, i,
                             files[i].name);
    return FSDP_OK;
}
