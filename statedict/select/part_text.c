/* The parts of a source for people: see part_text.h. */
#include "statedict/select/part_text.h"

#include "base/core/mem.h"

#include <inttypes.h>
#include <string.h>

static fsdp_part_label label_of(const fsdp_part_list *list, const fsdp_entry *entry, bool is_kept)
{
    fsdp_part_label found = {.kind = fsdp_part_of(list->parts, entry), .is_kept = is_kept};
    found.label = fsdp_part_label_of(list->parts, entry, &found.size);
    if (found.kind == FSDP_PART_MODEL)
        found.label = list->part ? list->part : "model";
    if (found.kind == FSDP_PART_OPTIM)
        found.label = "optimizer";
    if (found.kind == FSDP_PART_MODEL || found.kind == FSDP_PART_OPTIM)
        found.size = strlen(found.label);
    return found;
}

void fsdp_part_list_add(fsdp_part_list *list, const fsdp_entry *entry, bool is_kept)
{
    fsdp_part_label found = label_of(list, entry, is_kept);
    size_t at = 0;
    while (at < list->count &&
           (list->items[at].is_kept != is_kept || list->items[at].size != found.size ||
            memcmp(list->items[at].label, found.label, found.size) != 0))
        at++;
    if (at == FSDP_PART_LABELS) {
        list->more++;
        return;
    }
    if (at == list->count)
        list->items[list->count++] = found;
    list->items[at].tensors += entry->kind == FSDP_ENTRY_TENSOR;
}

static void add_part(const fsdp_part_label *item, fsdp_text *line)
{
    char shown[80];
    if (item->is_kept && item->tensors == 0)
        return;
    fsdp_text_addf(line, "%s%s", line->size > 0 ? " · " : "",
                   fsdp_printable(item->label, item->size, shown, sizeof shown));
    if (item->tensors > 0 && item->kind != FSDP_PART_OPTIM && item->kind != FSDP_PART_STATE)
        fsdp_text_addf(line, " %" PRId64, item->tensors);
    fsdp_text_addf(line, item->is_kept ? "" : " left out");
}

/* The part that is taken stands first, then weights, the optimizer, and the rest. */
static int rank_of(const fsdp_part_label *item)
{
    if (item->is_kept)
        return 0;
    if (item->tensors > 0 && item->kind == FSDP_PART_WEIGHTS)
        return 1;
    return item->kind == FSDP_PART_OPTIM ? 2 : 3;
}

fsdp_status fsdp_part_list_spell(const fsdp_part_list *list, fsdp_part_text *text, fsdp_error *err)
{
    size_t shown = 0, more = list->more;
    for (int round = 0; round <= 3; round++)
        for (size_t i = 0; i < list->count; i++) {
            const fsdp_part_label *item = &list->items[i];
            if (rank_of(item) != round)
                continue;
            if (shown < FSDP_PART_SHOWN)
                add_part(item, &text->line);
            else
                more++;
            shown++;
            if (round == 1 && text->other.size == 0)
                fsdp_text_add(&text->other, item->label, item->size);
        }
    if (more > 0)
        fsdp_text_addf(&text->line, " · %zu more left out", more);
    return text->line.failed || text->other.failed ? fsdp_fail_memory(err, "a list of parts")
                                                   : FSDP_OK;
}

void fsdp_part_text_release(fsdp_part_text *text)
{
    fsdp_text_release(&text->line);
    fsdp_text_release(&text->other);
}
