/* Items that several ranks stored, as a save without collectives leaves them: see dcp.h. */
#include "formats/dcp/dcp.h"

#include <string.h>

/* The contents of an item: a tensor, or a value. */
typedef struct item_contents {
    torch_archive archive;
    torch_kind kind;
    torch_tensor tensor;
    fsdp_value value;
} item_contents;

static const char *path_of(fsdp_source *source, const dcp_item *item)
{
    return fsdp_source_file_path(source, (size_t)item->file);
}

static void release(item_contents *contents)
{
    torch_tensor_release(&contents->tensor);
    fsdp_value_release(&contents->value);
    torch_archive_release(&contents->archive);
}

static fsdp_status open_item(fsdp_source *source, const dcp_item *item, bool has_value,
                             item_contents *out, fsdp_error *err)
{
    torch_wrapper wrapper;
    const torch_opening opening = {.source = source,
                                   .file = item->file,
                                   .stream = FSDP_NO_STREAM,
                                   .where = path_of(source, item)};
    FSDP_TRY(torch_zip_open(&opening, item->offset, item->length, false, &out->archive, err));
    FSDP_TRY(torch_tensor_read(&out->archive, out->archive.pickle.root, &out->kind, &out->tensor,
                               &wrapper, err));
    return out->kind == TORCH_KIND_NONE && has_value
               ? torch_value_read(&out->archive, out->archive.pickle.root, &out->value, err)
               : FSDP_OK;
}

static fsdp_status compare(fsdp_source *source, const dcp_replica *replica, item_contents both[2],
                           fsdp_facts *facts, fsdp_error *err)
{
    const dcp_item *items = replica->items;
    bool is_same = true, is_step = fsdp_fact_is_step(replica->name, replica->name_size);
    char shown[200];
    for (int i = 0; i < 2; i++)
        FSDP_TRY(open_item(source, &items[i], is_step, &both[i], err));
    for (int i = 0; i < 2 && is_step && both[0].kind == TORCH_KIND_NONE; i++)
        FSDP_TRY(fsdp_facts_note(facts, replica->name, replica->name_size,
                                 path_of(source, &items[i]), &both[i].value, err));
    if (both[0].kind != both[1].kind)
        is_same = false;
    else if (both[0].kind == TORCH_KIND_TENSOR)
        FSDP_TRY(torch_same_elements(source, &both[0].tensor, &both[1].tensor, TORCH_REPLICA,
                                     &is_same, err));
    return is_same
               ? FSDP_OK
               : fsdp_fail(err, FSDP_ERR_DAMAGED,
                           "'%s' and '%s' have different values of '%s'" FSDP_TWO_SAVES,
                           path_of(source, &items[0]), path_of(source, &items[1]),
                           fsdp_printable(replica->name, replica->name_size, shown, sizeof shown));
}

fsdp_status dcp_same_items(fsdp_source *source, const dcp_replica *replica, fsdp_facts *facts,
                           fsdp_error *err)
{
    item_contents both[2] = {{.kind = TORCH_KIND_NONE}};
    fsdp_status st = compare(source, replica, both, facts, err);
    release(&both[0]);
    release(&both[1]);
    return st;
}
