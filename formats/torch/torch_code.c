/*
 * Code in torch.save files: the classes and functions outside the evaluated list (pickle.h), which
 * Python runs when it loads a file. Every opened file notes them with its source.
 */
#include "base/io/io_memory.h"
#include "formats/torch/torch_internal.h"

#include <string.h>

static fsdp_status note_node(fsdp_source *source, int file, const fsdp_pickle *pickle,
                             fsdp_node node, fsdp_error *err)
{
    char *name = fsdp_pickle_global_name(pickle, node);
    if (!name)
        return fsdp_fail_memory(err, "a name");
    fsdp_status st = fsdp_source_note_code(source, file, name, err);
    fsdp_free(name);
    return st;
}

fsdp_status torch_note_code(const torch_opening *opening, const fsdp_pickle *pickle,
                            fsdp_error *err)
{
    fsdp_source *source = opening->source;
    for (size_t i = 0; i < pickle->count; i++) {
        if (!fsdp_pickle_is_code(pickle, (fsdp_node)i))
            continue;
        if (fsdp_source_code_at(source, (size_t)opening->file, FSDP_SOURCE_CODE - 1))
            return FSDP_OK;
        FSDP_TRY(note_node(source, opening->file, pickle, (fsdp_node)i, err));
    }
    return FSDP_OK;
}

/* --- blobs ------------------------------------------------------------------------------------ */

static const char where[] = "a stored value";

static void add_name(fsdp_text *names, const char *name)
{
    fsdp_text_addf(names, names->size > 0 ? ", %s" : "%s", name);
}

static fsdp_status open_blob(fsdp_source *source, int *file_out, fsdp_error *err)
{
    torch_archive archive;
    torch_opening opening = {.source = source, .stream = FSDP_NO_STREAM, .where = where};
    FSDP_TRY(fsdp_source_add_file(source, "value", false, &opening.file, err));
    *file_out = opening.file;
    fsdp_status st = torch_file_open(&opening, &archive, err);
    torch_archive_release(&archive);
    return st;
}

/* A file that PyTorch may read although this reader cannot counts as code. */
static fsdp_status read_file(const void *data, size_t size, fsdp_text *names, fsdp_error *err)
{
    fsdp_memory_io io;
    fsdp_source *source = NULL;
    fsdp_error found = {0};
    int file = 0;
    fsdp_memory_io_borrow(&io, data, size);
    FSDP_TRY(fsdp_source_create(&io.io, "value", "torch", &source, err));
    fsdp_status st = open_blob(source, &file, &found);
    if (st == FSDP_ERR_DAMAGED || st == FSDP_ERR_NOT_FOUND) {
        add_name(names, "bytes that cannot be read");
        st = FSDP_OK;
    } else if (st == FSDP_OK) {
        const char *name;
        for (size_t i = 0; (name = fsdp_source_code_at(source, (size_t)file, i)) != NULL; i++)
            add_name(names, name);
    } else if (err) {
        *err = found;
    }
    fsdp_source_close(source);
    return st;
}

/* A bare pickle. Other bytes that begin as one are data. */
static fsdp_status read_pickle(const void *data, size_t size, fsdp_text *names, fsdp_error *err)
{
    fsdp_pickle pickle;
    fsdp_pickle_options options = {.where = where, .depth = 1};
    fsdp_error found = {0};
    fsdp_status st = fsdp_pickle_parse(&options, data, size, &pickle, NULL, &found);
    if (st == FSDP_ERR_DAMAGED)
        return FSDP_OK;
    if (st != FSDP_OK && err)
        *err = found;
    bool is_code = false;
    for (size_t i = 0; i < pickle.count && !is_code; i++)
        is_code = fsdp_pickle_is_code(&pickle, (fsdp_node)i);
    if (is_code)
        add_name(names, "a pickle of unknown classes");
    fsdp_pickle_release(&pickle);
    return st;
}

fsdp_status fsdp_source_blob_code(const void *data, size_t size, fsdp_text *names, fsdp_error *err)
{
    const uint8_t *bytes = data;
    bool is_zip = size >= 4 && memcmp(data, "PK\3\4", 4) == 0;
    fsdp_status st = is_zip || torch_legacy_begins(bytes, size) ? read_file(data, size, names, err)
                     : size > 0 && bytes[0] == 0x80 ? read_pickle(data, size, names, err)
                                                    : FSDP_OK;
    return st == FSDP_OK && names->failed ? fsdp_fail_memory(err, "a name") : st;
}
