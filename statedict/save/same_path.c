/*
 * A save and a load use the path that rank 0 gives. Ranks that give another one mean another checkpoint:
 * they are told so, instead of reading or writing that of rank 0.
 */
#include "statedict/save/save_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/core/fnv.h"
#include "base/core/mem.h"
#include "statedict/ctl/ctl_backend.h"

enum { PATH_SHOWN = 400 };

/* "a//b/./" is "a/b". */
uint64_t fsdp_path_print(const char *path)
{
    uint64_t print = FSDP_FNV_BEGIN;
    if (path[0] == '/')
        print = fsdp_fnv(print, "/", 1);
    while (*path) {
        size_t size = strcspn(path, "/");
        if (size > 0 && !(size == 1 && path[0] == '.')) {
            print = fsdp_fnv(print, path, size);
            print = fsdp_fnv(print, "/", 1);
        }
        path += size + (path[size] == '/');
    }
    return print;
}

fsdp_status fsdp_fail_paths(fsdp_ctl *ctl, int rank, const char *path, fsdp_error *err)
{
    char first[PATH_SHOWN] = "", other[PATH_SHOWN] = ""; /* all bytes are sent */
    snprintf(first, sizeof first, "%s", path);
    snprintf(other, sizeof other, "%s", path);
    FSDP_TRY(fsdp_ctl_broadcast(ctl, 0, first, sizeof first, err));
    FSDP_TRY(fsdp_ctl_broadcast(ctl, rank, other, sizeof other, err));
    if (err)
        err->rank = rank;
    return fsdp_fail(err, FSDP_ERR_USAGE, "ranks give different paths: rank %d '%s', rank 0 '%s'",
                     rank, other, first);
}

fsdp_status fsdp_agree_path(fsdp_ctl *ctl, const char *path, fsdp_status mine, fsdp_error *err)
{
    const int ranks = fsdp_ctl_size(ctl);
    const uint64_t print = path ? fsdp_path_print(path) : 0;
    uint64_t *all = fsdp_alloc((size_t)ranks, sizeof *all);
    if (mine == FSDP_OK && !all)
        mine = fsdp_fail_memory(err, "a comparison of ranks");
    fsdp_status st = fsdp_ctl_agree_allgather(ctl, mine, &print, sizeof print, all, err);
    for (int rank = 1; rank < ranks && st == FSDP_OK; rank++)
        if (all[rank] != all[0])
            st = fsdp_fail_paths(ctl, rank, path, err);
    fsdp_free(all);
    return st;
}
