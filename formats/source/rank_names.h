/* Names of rank files: the files of a directory that belong together, and the rank that each name states. */
#ifndef FSDP_RANK_NAMES_H
#define FSDP_RANK_NAMES_H

#include "base/core/mem.h"
#include "base/data/name_table.h"

typedef struct rank_file {
    int rank;
    const char *name;
} rank_file;

/* Files whose names differ only in the number of their rank. */
typedef struct rank_group {
    const char *pattern;       /* with "{r}" */
    size_t stem;               /* bytes of the pattern before "{r}" */
    int world;                 /* as the name states it; 0: not stated */
    bool says_rank;            /* the number follows the word "rank" */
    rank_file *files;          /* sorted by rank */
    size_t count, room;
} rank_group;

typedef struct rank_names {
    fsdp_arena arena;
    rank_group *groups;
    size_t count, room;
    fsdp_name_table table;
} rank_names;

/* Groups names (sorted): those that match the pattern ("{r}" once, "{W}" for the world at most once), or,
 * with pattern NULL, those that hold a number, the one after "rank" or else the last. */
fsdp_status rank_names_group(const char *const *names, size_t count, const char *pattern,
                             rank_names *out, fsdp_error *err);
void rank_names_release(rank_names *names);

#endif
