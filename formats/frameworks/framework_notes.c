/* Notes and errors while a path is resolved to a checkpoint: see framework_folder.h. */
#include "formats/frameworks/framework_folder.h"

#include "base/core/mem.h"

#include <string.h>

enum { NAMES_SHOWN = 5 };

fsdp_status fsdp_folder_fail_looks(const char *path, fsdp_error *err)
{
    return fsdp_fail(err, FSDP_ERR_USAGE,
                     "%d files and folders were opened on the way to a checkpoint, and '%s' holds "
                     "more: name the checkpoint itself",
                     FSDP_FOLDER_LOOKS, path);
}

fsdp_status fsdp_folder_fail_several(const fsdp_folder *folder, const char *const *names,
                                     size_t count, fsdp_error *err)
{
    fsdp_text text = {0};
    bool is_all = count < FSDP_FOLDER_NAMES;
    for (size_t i = 0; i < count && i < NAMES_SHOWN; i++) {
        char *path = fsdp_path_join(folder->path, names[i]);
        fsdp_text_addf(&text, "%s", i > 0 ? ", " : "");
        if (path)
            fsdp_text_add_quoted(&text, path); /* fsdp-convert makes a command line of it */
        text.failed = text.failed || !path;
        fsdp_free(path);
    }
    if (!is_all)
        fsdp_text_addf(&text, " and others");
    else if (count > NAMES_SHOWN)
        fsdp_text_addf(&text, " and %zu more", count - NAMES_SHOWN);
    fsdp_status st =
        text.failed
            ? fsdp_fail_memory(err, folder->path)
            : fsdp_fail(err, FSDP_ERR_USAGE, "'%s' holds %zu%s checkpoints; name one of them: %s",
                        folder->path, count, is_all ? "" : " or more", text.data);
    fsdp_text_release(&text);
    return st;
}

/* Is it left out when the model alone is read? */
static bool is_other(const fsdp_framework_row *row, const char *name)
{
    if (!row)
        return fsdp_framework_matches(fsdp_framework_no_model, name, NULL);
    for (int i = 0; i < FSDP_FRAMEWORK_PARTS && row->parts[i].names; i++)
        if (fsdp_framework_matches(row->parts[i].names, name, NULL))
            return true;
    return row->others && fsdp_framework_matches(row->others, name, NULL);
}

static bool is_read(const fsdp_io_names *parts, const char *name)
{
    for (size_t i = 0; i < parts->count; i++)
        if (fsdp_framework_matches(parts->items[i], name, NULL))
            return true;
    return false;
}

/* The directory that was named is the checkpoint. */
static bool is_itself(const char *member)
{
    return strcmp(member, ".") == 0;
}

/* "; optimizer left out: A, B", or "; left out: C" */
static void add_others(const fsdp_folder *folder, const fsdp_io_names *parts, bool is_optim,
                       fsdp_text *text)
{
    size_t shown = 0;
    for (size_t i = 0; i < folder->names.count; i++) {
        const char *name = folder->names.items[i];
        if (!is_other(folder->row, name) || is_read(parts, name) ||
            fsdp_framework_matches("optim*", name, NULL) != is_optim)
            continue;
        if (shown++ < NAMES_SHOWN)
            fsdp_text_addf(text, "%s%s",
                           shown > 1  ? ", "
                           : is_optim ? "; optimizer left out: "
                                      : "; left out: ",
                           name);
    }
    if (shown > NAMES_SHOWN)
        fsdp_text_addf(text, " and %zu more", shown - NAMES_SHOWN);
}

/* "'run' (torchtitan) is read as 'checkpoint/step-10' and 'optim.pt'" */
static void add_choice(const fsdp_folder *folder, const char *member, const fsdp_io_names *parts,
                       fsdp_text *text)
{
    const fsdp_framework_row *row = folder->row;
    fsdp_text_addf(text, "'%s'%s%s%s is read as ", folder->path, row ? " (" : "",
                   row ? row->made_by : "", row ? ")" : "");
    if (is_itself(member))
        fsdp_text_addf(text, "the model");
    else
        fsdp_text_addf(text, "'%s'", member);
    for (size_t i = 0; i < parts->count; i++)
        fsdp_text_addf(text, "%s'%s'", i + 1 < parts->count ? ", " : " and ", parts->items[i]);
}

void fsdp_folder_note_choice(const fsdp_folder *folder, const char *member,
                             const fsdp_io_names *parts)
{
    fsdp_text text = {0}, others = {0};
    if (parts->count == 0)
        add_others(folder, parts, true, &others);
    add_others(folder, parts, false, &others);
    bool is_whole = is_itself(member) && parts->count > 0 && others.size == 0 && !others.failed;
    add_choice(folder, member, parts, &text);
    fsdp_text_add(&text, others.data, others.size);
    if (folder->note && !is_whole && !text.failed && !others.failed)
        folder->note(folder->context, text.data);
    fsdp_text_release(&others);
    fsdp_text_release(&text);
}

void fsdp_folder_note_skipped(const fsdp_folder *folder, const char *name, const char *why)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "skipping '%s' of '%s': %s", name, folder->path, why);
    if (folder->note && !text.failed)
        folder->note(folder->context, text.data);
    fsdp_text_release(&text);
}
