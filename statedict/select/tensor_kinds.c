/* Tensors that a source lists as values: see tensor_kinds.h. */
#include "statedict/select/tensor_kinds.h"

#include "formats/source.h"

#include <string.h>

static const char quantized[] = "quantized", sparse[] = "sparse", jagged[] = "jagged",
                  meta[] = "meta", untyped[] = "void", flat[] = "flat", other[] = "other";
static const char *const kinds[] = {quantized, sparse, jagged, meta, untyped, flat, other};
enum { KIND_COUNT = sizeof kinds / sizeof *kinds };

const char *fsdp_tensor_kinds(void)
{
    return "quantized, sparse, jagged, meta, void, flat, other";
}

const char *fsdp_tensor_kind_named(const char *name)
{
    for (int i = 0; i < KIND_COUNT; i++)
        if (strcmp(kinds[i], name) == 0)
            return kinds[i];
    return NULL;
}

/* --- classes ---------------------------------------------------------------------------------- */

/* The first rule whose beginning and end a class has names its kind. The readers' names of classes:
 * formats/torch/torch_value.c, formats/npy/npz_read.c, formats/hdf5_child/hdf5_child_type.c. */
static const struct {
    const char *begin, *end, *kind;
    bool is_subclass; /* without a storage of its own */
} classes[] = {
    {"torch._utils._rebuild_qtensor", "", quantized, false},
    {"torch._utils._rebuild_sparse", "", sparse, false},
    {"torch._utils._rebuild_nested", "", jagged, false},
    {"torch.nested.", "Tensor", jagged, false},
    {"torch._utils._rebuild_meta", "", meta, false},
    {"torch._utils._rebuild_", "", other, false},
    {"torch.", "Tensor", other, true},
    {"torchao.", "Tensor", quantized, true},
    {"torchao.optim.subclass_", "", quantized, true},
    {"torchao.prototype.low_bit_optim.subclass_", "", quantized, true},
    {"optimum.quanto.", "Tensor", quantized, true},
    {"torchtune.", "Tensor", quantized, true},
    {"transformer_engine.", "Tensor", quantized, true},
    {"numpy array of '|V", "'", untyped, false},
    {"numpy array of '<V", "'", untyped, false},
    {"numpy array of '>V", "'", untyped, false},
    {"numpy array of '<f", "'", other, false},
    {"numpy array of '>f", "'", other, false},
    {"numpy array of '<c", "'", other, false},
    {"numpy array of '>c", "'", other, false},
    {"floating type of ", "", other, false},
    {"integer of ", "", other, false},
    {"", "Tensor", other, true},
};

static bool fits(const char *text, size_t size, const char *begin, const char *end)
{
    size_t first = strlen(begin), last = strlen(end);
    return size >= first + last && memcmp(text, begin, first) == 0 &&
           memcmp(text + size - last, end, last) == 0;
}

/* The rule of a class, -1 for none. */
static int rule_of(const fsdp_value *value)
{
    for (int i = 0; i < (int)(sizeof classes / sizeof *classes); i++)
        if (fits(value->as.bytes.data, value->as.bytes.size, classes[i].begin, classes[i].end))
            return i;
    return -1;
}

/* --- values ----------------------------------------------------------------------------------- */

static bool has_items(const fsdp_value *value)
{
    return value->kind == FSDP_VALUE_LIST || value->kind == FSDP_VALUE_DICT;
}

static const char *kind_of_value(const fsdp_value *value)
{
    int rule = value->kind == FSDP_VALUE_CLASS ? rule_of(value) : -1;
    const char *kind = rule >= 0 ? classes[rule].kind : NULL;
    for (size_t i = 0; !kind && has_items(value) && i < value->as.list.count; i++)
        kind = kind_of_value(&value->as.list.items[i]);
    return kind;
}

static bool holds_tensor(const fsdp_value *value)
{
    bool is_found = value->kind == FSDP_VALUE_TENSOR;
    for (size_t i = 0; !is_found && has_items(value) && i < value->as.list.count; i++)
        is_found = holds_tensor(&value->as.list.items[i]);
    return is_found;
}

/* The value in a blob, a torch.save file, or NULL; the caller closes the source. */
static const fsdp_value *open_blob(const fsdp_value *value, fsdp_source **source_out)
{
    size_t size = value->kind == FSDP_VALUE_OPAQUE ? value->as.bytes.size : 0;
    *source_out = NULL;
    if (size < 4 || memcmp(value->as.bytes.data, "PK\3\4", 4) != 0 ||
        fsdp_source_open_blob(value->as.bytes.data, size, source_out, NULL) != FSDP_OK)
        return NULL;
    return fsdp_source_entry_at(*source_out, 0)->value;
}

bool fsdp_value_holds_tensor(const fsdp_value *value)
{
    fsdp_source *source;
    const fsdp_value *inside = open_blob(value, &source);
    bool is_found = holds_tensor(inside ? inside : value);
    fsdp_source_close(source);
    return is_found;
}

/* --- entries ---------------------------------------------------------------------------------- */

/* "flat_param", "_flat_param", "flat_param_3" after the last dot. */
static bool is_flat_name(const char *name, size_t size)
{
    static const char word[] = "flat_param";
    const char *end = name + size, *last = end;
    while (last > name && last[-1] != '.')
        last--;
    if (last < end && *last == '_')
        last++;
    if ((size_t)(end - last) < sizeof word - 1 || memcmp(last, word, sizeof word - 1) != 0)
        return false;
    last += sizeof word - 1;
    if (last < end && *last == '_')
        last++;
    while (last < end && *last >= '0' && *last <= '9')
        last++;
    return last == end;
}

static bool has_flat(const fsdp_sd *sd, const char *prefix, size_t size)
{
    static const char last[] = "_flat_param";
    fsdp_text name = {0};
    fsdp_text_add(&name, prefix, size);
    fsdp_text_add(&name, last, sizeof last - 1);
    int64_t number = name.failed ? -1 : fsdp_sd_find(sd, name.data, name.size);
    fsdp_text_release(&name);
    return number >= 0 && fsdp_sd_at(sd, (size_t)number)->kind == FSDP_ENTRY_TENSOR;
}

bool fsdp_is_flat_piece(const fsdp_sd *sd, const fsdp_entry *entry)
{
    bool is_piece = false;
    if (entry->kind != FSDP_ENTRY_VALUE || !fsdp_value_per_rank(&entry->value) ||
        !fsdp_value_holds_tensor(&entry->value))
        return false;
    for (size_t at = entry->name_size; at-- > 0 && !is_piece;)
        if (at == 0 || entry->name[at - 1] == '.')
            is_piece = has_flat(sd, entry->name, at);
    return is_piece;
}

static bool is_subclass(const fsdp_value *value)
{
    int rule = value->kind == FSDP_VALUE_CLASS ? rule_of(value) : -1;
    return rule >= 0 && classes[rule].is_subclass;
}

const char *fsdp_tensor_kind(const fsdp_entry *entry, bool *is_subclass_out)
{
    *is_subclass_out = false;
    if (entry->kind != FSDP_ENTRY_VALUE)
        return entry->kind == FSDP_ENTRY_TENSOR && entry->ndim == 1 &&
                       is_flat_name(entry->name, entry->name_size)
                   ? flat
                   : NULL;
    fsdp_source *source;
    const fsdp_value *inside = open_blob(&entry->value, &source);
    const char *kind = kind_of_value(inside ? inside : &entry->value);
    *is_subclass_out = is_subclass(inside ? inside : &entry->value);
    fsdp_source_close(source);
    return kind;
}
