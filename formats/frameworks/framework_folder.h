/*
 * One directory while a path is resolved to a checkpoint: its names, the row of the table that fits, and the
 * parts that the row reads together. frameworks.c lists it, finds names in it, recognises files of other
 * programs and goes from directory to directory; framework_shards.c opens the files of its tensor and
 * pipeline ranks; framework_folder.c has what both keep to.
 */
#ifndef FSDP_FRAMEWORK_FOLDER_H
#define FSDP_FRAMEWORK_FOLDER_H

#include "formats/frameworks.h"

enum { FSDP_FOLDER_LOOKS = 4096, FSDP_FOLDER_NAMES = 64 };

typedef struct fsdp_folder {
    fsdp_io *io;
    const char *path;
    fsdp_io_names names;       /* sorted */
    fsdp_io_names members;     /* of the row that fits, as they are opened */
    fsdp_framework_note note;
    void *context;
    const fsdp_framework_row *row; /* that fits; NULL: none */
    bool whole;                /* a row with parts is the result, not its model */
    bool is_chosen;            /* the person named the format: a pointer to nothing is not followed */
    int deeper;                /* levels that the resolution may still go down from here */
    int *left;                 /* listings and opens that all of it may still make; -1: exceeded */
} fsdp_folder;

/* Counts a listing or an open; false: there were FSDP_FOLDER_LOOKS of them. */
bool fsdp_folder_may_look(const fsdp_folder *folder);
/* Fails because of that. */
fsdp_status fsdp_folder_fail_looks(const char *path, fsdp_error *err);
/* FSDP_ERR_REFUSED when "NAME" or "FOLDER/NAME" in the directory is or goes through a link. */
fsdp_status fsdp_folder_check_links(const fsdp_folder *folder, const char *name, fsdp_error *err);

/* --- framework_shards.c -------------------------------------------------------------------------- */

/* One source of the files of all ranks of a row with shards. */
fsdp_status fsdp_folder_open_shards(const fsdp_folder *folder, const fsdp_source_opts *opts,
                                    fsdp_source **source_out, fsdp_error *err);

#endif
