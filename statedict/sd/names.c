/* Lists of names for messages: see names.h. */
#include "statedict/sd/names.h"

#include "base/values_shape.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <fsdp/checkpoint.h>

bool fsdp_names_add(fsdp_name_list *names, const char *name, size_t size)
{
    char shown[400];
    fsdp_printable(name, size, shown, sizeof shown);
    if (!fsdp_grow(&names->items, &names->capacity, names->count + 1, sizeof *names->items))
        return false;
    names->items[names->count] = fsdp_strndup(shown, strlen(shown));
    return names->items[names->count++] != NULL;
}

void fsdp_names_release(fsdp_name_list *names)
{
    for (size_t i = 0; i < names->count; i++)
        fsdp_free(names->items[i]);
    fsdp_free(names->items);
    *names = (fsdp_name_list){0};
}

void fsdp_names_move(fsdp_name_list *names, char ***items_out, size_t *count_out)
{
    *items_out = names->items;
    *count_out = names->count;
    *names = (fsdp_name_list){0};
}

bool fsdp_names_append(const fsdp_name_list *names, const char *what, fsdp_text *text)
{
    enum { SHOWN_BYTES = 300 };
    if (names->count == 0)
        return true;
    fsdp_text_addf(text, "; %zu %s:", names->count, what);
    size_t start = text->size;
    for (size_t i = 0; i < names->count; i++) {
        if (text->size - start > SHOWN_BYTES) {
            fsdp_text_addf(text, " and %zu more", names->count - i);
            return false;
        }
        fsdp_text_addf(text, "%s '%s'", i ? "," : "", names->items[i]);
    }
    return true;
}

void fsdp_load_report_release(fsdp_load_report *report)
{
    if (!report)
        return;
    fsdp_name_list missing = {report->missing, report->missing_count, 0};
    fsdp_name_list unexpected = {report->unexpected, report->unexpected_count, 0};
    fsdp_names_release(&missing);
    fsdp_names_release(&unexpected);
    fsdp_free(report->path);
    *report = (fsdp_load_report){0};
}

const char *fsdp_shape_text(int ndim, const int64_t *shape, char *out, size_t room)
{
    size_t used = (size_t)snprintf(out, room, "[");
    for (int d = 0; d < ndim && used < room; d++)
        used += (size_t)snprintf(out + used, room - used, "%s%" PRId64, d ? ", " : "", shape[d]);
    if (used < room)
        snprintf(out + used, room - used, "]");
    return out;
}

const char *fsdp_tensor_shape_text(const fsdp_entry *tensor, char *out, size_t room)
{
    int64_t values[FSDP_MAX_DIMS];
    fsdp_dtype_to_values(tensor->dtype, tensor->ndim, tensor->shape, values);
    return fsdp_shape_text(tensor->ndim, values, out, room);
}
