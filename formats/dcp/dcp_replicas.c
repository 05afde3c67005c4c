/* Items that several ranks stored, as a save without collectives leaves them: see dcp.h. */
#include "formats/dcp/dcp.h"

#include <string.h>

struct dcp_replica {
    const char *name;
    size_t name_size;
    dcp_item items[2];
};

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

static fsdp_status compare(fsdp_source *source, const struct dcp_replica *replica,
                           item_contents both[2], fsdp_facts *facts, fsdp_error *err)
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

static fsdp_status compare_one(fsdp_source *source, const struct dcp_replica *replica,
                               fsdp_facts *facts, fsdp_error *err)
{
    item_contents both[2] = {{.kind = TORCH_KIND_NONE}};
    fsdp_status st = compare(source, replica, both, facts, err);
    release(&both[0]);
    release(&both[1]);
    return st;
}

fsdp_status dcp_replicas_compare(const dcp_replicas *replicas, fsdp_source *source, fsdp_error *err)
{
    fsdp_facts facts = {0};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < replicas->count && st == FSDP_OK; i++)
        st = compare_one(source, &replicas->all[i], &facts, err);
    fsdp_facts_release(&facts);
    return st;
}

/* --- the list ------------------------------------------------------------------------------------ */

void dcp_replicas_release(dcp_replicas *replicas)
{
    fsdp_free(replicas->all);
    fsdp_arena_release(&replicas->arena);
}

fsdp_status dcp_replicas_keep(dcp_replicas *replicas, const char *name, size_t name_size,
                              const dcp_item items[2], fsdp_error *err)
{
    if (items[0].is_packed || items[1].is_packed || items[0].header || items[1].header)
        return FSDP_OK;
    char *kept = fsdp_arena_strndup(&replicas->arena, name, name_size);
    if (!kept ||
        !fsdp_grow(&replicas->all, &replicas->room, replicas->count + 1, sizeof *replicas->all))
        return fsdp_fail_memory(err, "the items of a checkpoint");
    replicas->all[replicas->count++] = (struct dcp_replica){kept, name_size, {items[0], items[1]}};
    return FSDP_OK;
}
