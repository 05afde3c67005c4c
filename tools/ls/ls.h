/*
 * The parts of fsdp-ls. In comes an opened checkpoint with the selected entries (ls_listing), out comes text
 * or JSON on standard output. Only fsdp-ls calls this room, except ls_add_value, which fsdp-diff shares.
 */
#ifndef FSDP_LS_H
#define FSDP_LS_H

#include "tools/cli/cli.h"

#include <fsdp/convert.h>

typedef enum ls_mode {
    LS_SUMMARY, LS_LONG, LS_SHARDS, LS_TREE, LS_CONFIG, LS_STATS, LS_HIST
} ls_mode;

typedef enum ls_sort { LS_SORT_ORDER, LS_SORT_NAME, LS_SORT_SIZE } ls_sort;

typedef struct ls_options {
    cli_common common;
    const char **paths;
    int path_count;
    ls_mode mode, usual;       /* what is shown, and what when no option asks */
    ls_sort sort;
    bool digest, sort_given;
    fsdp_map_opts map;         /* of another framework, whose names are shown */
    const char **sizes;        /* of the map, which borrows them */
    const char *variant;       /* of a directory; NULL: the plain files */
} ls_options;

typedef struct ls_listing {
    const ls_options *options;
    fsdp_watch watch;
    fsdp_checkpoint *checkpoint;
    const fsdp_checkpoint_info *info;
    const fsdp_sd *sd;
    size_t *order;             /* numbers of the selected entries, as they are listed */
    size_t count;
    int64_t done, total;       /* bytes of tensors, for progress */
    bool names_tuples;         /* of values: {"tuple": [...]}, where listings have a list */
    bool plain_dicts;          /* of values: {"lr": 0.1} for a dict with text keys, where listings have
                                * {"dict": [["lr", 0.1]]} */
    fsdp_error failure;        /* of a tensor inside a value */
} ls_listing;

fsdp_status ls_print_summary(ls_listing *listing, fsdp_text *text);

/* The logical shape: packed six-bit types and blocks count values here, and bytes and blocks in the
 * checkpoint. */
void ls_shape(const fsdp_entry *tensor, int64_t shape_out[FSDP_MAX_DIMS]);

/* The layout of entry `number` in words: "shard dim 0 (288 per rank)", "replicated", ... */
void ls_add_layout(fsdp_text *text, const ls_listing *listing, size_t number);

/* A value as listings spell it (docs/man/fsdp-ls.1.scd). */
void ls_add_value(ls_listing *listing, fsdp_text *text, const fsdp_value *value);

/* The directory of the zstd filter for other programs, or "" when it is not found. */
void ls_plugin_path(char *out, size_t size);

#endif
