/* The row of the table that a directory fits, and what the row's pointer names: see framework_folder.h. */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"

#include <stdlib.h>
#include <string.h>

enum { NAMES_SHOWN = 5, POINTER_MOST = 4096 };

/* The name in the directory that the text is, or whose number it is: "5" for iter_0000005. */
static const char *find_pointed(const fsdp_folder *folder, const fsdp_framework_row *row,
                                const char *text)
{
    size_t digits = strspn(text, "0123456789");
    bool is_number = digits > 0 && digits < 18 && text[digits] == '\0';
    for (size_t i = 0; i < folder->names.count; i++) {
        int64_t number;
        if (strcmp(folder->names.items[i], text) == 0 ||
            (is_number && row->pointed &&
             fsdp_framework_matches(row->pointed, folder->names.items[i], &number) &&
             number == strtoll(text, NULL, 10)))
            return folder->names.items[i];
    }
    return NULL;
}

/* Folders, and files of weights. */
static fsdp_status list_there(const fsdp_folder *folder, fsdp_text *text, fsdp_error *err)
{
    size_t shown = 0;
    for (size_t i = 0; i < folder->names.count && i < FSDP_FOLDER_NAMES; i++) {
        const char *name = folder->names.items[i];
        fsdp_file_kind kind;
        char quoted[200];
        FSDP_TRY(fsdp_folder_kind(folder, name, &kind, err));
        if (kind != FSDP_FILE_DIRECTORY && !fsdp_folder_is_weights(name))
            continue;
        if (shown++ < NAMES_SHOWN)
            fsdp_text_addf(text, "%s'%s'", shown > 1 ? ", " : "",
                           fsdp_printable(name, strlen(name), quoted, sizeof quoted));
    }
    if (shown > NAMES_SHOWN)
        fsdp_text_addf(text, " and %zu more", shown - NAMES_SHOWN);
    if (shown == 0)
        fsdp_text_addf(text, "no checkpoint");
    return FSDP_OK;
}

static fsdp_status fail_pointer(const fsdp_folder *folder, const fsdp_framework_row *row,
                                const char *text, size_t size, fsdp_error *err)
{
    fsdp_text there = {0};
    char quoted[120];
    fsdp_status st = list_there(folder, &there, err);
    if (st == FSDP_OK)
        st = there.failed
                 ? fsdp_fail_memory(err, folder->path)
                 : fsdp_fail(err, FSDP_ERR_DAMAGED,
                             "'%s/%s' names '%s', which is not there; '%s' has %s: name the one to "
                             "read by its path, or fsdp-convert --from FORMAT",
                             folder->path, row->pointer,
                             fsdp_printable(text, size, quoted, sizeof quoted), folder->path,
                             there.data);
    fsdp_text_release(&there);
    return st;
}

static bool has_pointer(const fsdp_folder *folder, const fsdp_framework_row *row)
{
    fsdp_file_kind kind;
    return fsdp_folder_kind(folder, row->pointer, &kind, NULL) == FSDP_OK &&
           kind == FSDP_FILE_REGULAR;
}

/* The text of the pointer, less the line ends and spaces after it. The caller frees it. */
static fsdp_status read_pointer(const fsdp_folder *folder, const fsdp_framework_row *row,
                                char **text_out, size_t *size_out, fsdp_error *err)
{
    char *path = fsdp_path_join(folder->path, row->pointer);
    *text_out = NULL;
    fsdp_status st =
        path ? fsdp_io_read_file(folder->io, path, POINTER_MOST, text_out, size_out, err)
             : fsdp_fail_memory(err, "a path");
    while (st == FSDP_OK && *size_out > 0 && strchr(" \t\r\n", (*text_out)[*size_out - 1]))
        (*text_out)[--*size_out] = '\0';
    fsdp_free(path);
    return st;
}

fsdp_status fsdp_folder_pointed(const fsdp_folder *folder, const fsdp_framework_row *row,
                                const char **name_out, fsdp_error *err)
{
    char *text = NULL;
    size_t size = 0;
    *name_out = NULL;
    fsdp_status st = read_pointer(folder, row, &text, &size, err);
    if (st == FSDP_OK)
        *name_out = find_pointed(folder, row, text);
    if (st == FSDP_OK && !*name_out)
        st = fail_pointer(folder, row, text, size, err);
    fsdp_free(text);
    return st;
}

/* A pointer to what is not there says nothing when the person named the format. */
static bool counts(const fsdp_folder *folder, const fsdp_framework_row *row)
{
    const char *name = NULL;
    return has_pointer(folder, row) &&
           (!folder->is_chosen || fsdp_folder_pointed(folder, row, &name, NULL) == FSDP_OK);
}

const fsdp_framework_row *fsdp_folder_row(const fsdp_folder *folder)
{
    for (size_t r = 0; r < fsdp_framework_row_count; r++) {
        const fsdp_framework_row *row = &fsdp_framework_rows[r];
        bool is_it = true;
        for (int i = 0; i < FSDP_FRAMEWORK_MARKERS && is_it && row->markers[i]; i++)
            is_it = fsdp_folder_find(folder, row->markers[i]) != NULL;
        if (is_it && (!row->pointer || counts(folder, row)))
            return row;
    }
    return NULL;
}
