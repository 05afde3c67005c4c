/* The files of a checkpoint and their digests, read several at a time. */
#ifndef FSDP_FILE_LIST_H
#define FSDP_FILE_LIST_H

#include "base/io/io.h"
#include <fsdp/checkpoint.h>

enum { FSDP_FILE_DIGEST = 32 };

typedef struct fsdp_listed_file {
    const char *path;
    const char *name;          /* for people and files: relative */
    int64_t size;
    uint8_t digest[FSDP_FILE_DIGEST];  /* XXH3-128: the first 16 bytes */
} fsdp_listed_file;

/* Zero-initialise but io. */
typedef struct fsdp_file_list {
    fsdp_io *io;
    fsdp_listed_file *items;
    size_t count, room;
    fsdp_arena arena;
} fsdp_file_list;

void fsdp_file_list_release(fsdp_file_list *list);

/* Adds a file; path and name are copied. */
fsdp_status fsdp_file_list_add(fsdp_file_list *list, const char *path, const char *name, int64_t size,
                               fsdp_error *err);
/* Adds a file, or every regular file below a directory, except links and names that wanted (NULL: all)
 * refuses. A name is the path from its byte prefix_size on. */
fsdp_status fsdp_file_list_add_tree(fsdp_file_list *list, const char *path, size_t prefix_size,
                                    bool (*wanted)(void *context, const char *name), fsdp_error *err);
/* By name, byte by byte; of equal names one stays. */
void fsdp_file_list_sort(fsdp_file_list *list);

typedef enum fsdp_digest_kind { FSDP_DIGEST_SHA256, FSDP_DIGEST_XXH3 } fsdp_digest_kind;

typedef struct fsdp_digest_opts {
    fsdp_digest_kind kind;
    bool follow_links;         /* reads links that are files of the list; otherwise they are refused */
    int threads;
    int64_t memory;
    const fsdp_watch *watch;
} fsdp_digest_opts;

/* Fills in the digests of all files, of exactly `size` bytes each. */
fsdp_status fsdp_file_list_digest(fsdp_file_list *list, const fsdp_digest_opts *opts, fsdp_error *err);

#endif
