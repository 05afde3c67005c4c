/* Finds scales by the names that programs give them: see scales.h. */
#include "statedict/select/scales.h"

#include "statedict/sd/names.h"

#include <string.h>

/*
 * The name of a scale: the tensor's module, `before`, the tensor's own name without `cut` at its
 * end, `after`. An empty `own` fits any name. Written by:
 *   transformers, DeepSeek (weight_scale_inv); compressed-tensors, fbgemm, modelopt, vLLM
 *   (weight_scale); ComfyUI (scale_weight); Mistral (qscale_weight); DeepSeek's own files
 *   (weight, scale); torchao (weight_qdata, weight_scale; qdata, scale; _data, _scale); GPTQ, AWQ (qweight,
 *   scales); compressed-tensors' integers (weight_packed, weight_scale); MXFP4 (x_blocks, x_scales)
 */
static const struct {
    const char *own, *before, *cut, *behind;
    bool drops_own; /* the scale's name does not repeat the tensor's */
    bool is_known;  /* to --dequant (derive/element_types.c) */
} spellings[] = {
    {"", "", "", "_scale_inv", false, true},     {"", "", "", "_scale", false, true},
    {"", "", "", "_scales", false, false},       {"", "", "", ".scale", false, false},
    {"", "scale_", "", "", false, false},        {"", "qscale_", "", "", false, false},
    {"", "", "_qdata", "_scale", false, false},  {"weight", "scale", "", "", true, true},
    {"weight", "scales", "", "", true, false},   {"weight", "scale_inv", "", "", true, false},
    {"qdata", "scale", "", "", true, false},     {"_data", "_scale", "", "", true, false},
    {"qweight", "scales", "", "", true, false},  {"", "", "_packed", "_scale", false, false},
    {"", "", "_blocks", "_scales", false, true},
};

/* Parts of a tensor that bitsandbytes or GPTQ quantized to integers; kernels read them in their dtype. */
static const struct {
    const char *own, *part;
} parts[] = {{"", ".absmax"},           {"", ".quant_map"}, {"", ".nested_absmax"},
             {"", ".nested_quant_map"}, {"weight", "SCB"},  {"qweight", "scales"}}; /* GPTQ, AWQ */

enum { SPELLINGS = sizeof spellings / sizeof *spellings, PARTS = sizeof parts / sizeof *parts };

typedef struct scale_search {
    const fsdp_sd *sd;
    const fsdp_selected *selected;
    fsdp_name_list found;
    fsdp_text name; /* scratch */
    bool no_memory;
    bool has_unknown; /* a pair that --dequant does not know */
    fsdp_scales_report report;
} scale_search;

static const fsdp_entry *tensor_at(const fsdp_sd *sd, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(sd, i);
    return entry->kind == FSDP_ENTRY_ALIAS ? fsdp_sd_at(sd, entry->target) : entry;
}

/* A tensor of the name in search->name, -1 for none. */
static int64_t find_named(scale_search *search)
{
    if (search->name.failed) {
        search->no_memory = true;
        return -1;
    }
    int64_t i = fsdp_sd_find(search->sd, search->name.data, search->name.size);
    return i >= 0 && fsdp_sd_at(search->sd, (size_t)i)->kind != FSDP_ENTRY_VALUE ? i : -1;
}

static bool ends(const char *text, size_t size, const char *end)
{
    size_t last = strlen(end);
    return size >= last && memcmp(text + size - last, end, last) == 0;
}

static bool is_f8(fsdp_dtype dtype)
{
    const fsdp_dtype_info *info = fsdp_dtype_describe(dtype);
    return info && info->is_float && info->size == 1 && dtype != FSDP_F8_E8M0FNU;
}

/* Writes the name that spelling s gives the scale of a tensor; false when it gives none. */
static bool spell(scale_search *search, const fsdp_entry *entry, int s)
{
    const char *own = entry->name + entry->name_size;
    while (own > entry->name && own[-1] != '.')
        own--;
    size_t size = (size_t)(entry->name + entry->name_size - own);
    bool is_own = size == strlen(spellings[s].own) && memcmp(own, spellings[s].own, size) == 0;
    if ((*spellings[s].own && !is_own) || !ends(own, size, spellings[s].cut))
        return false;
    search->name.size = 0;
    fsdp_text_add(&search->name, entry->name, (size_t)(own - entry->name));
    fsdp_text_addf(&search->name, "%s", spellings[s].before);
    if (!spellings[s].drops_own)
        fsdp_text_add(&search->name, own, size - strlen(spellings[s].cut));
    fsdp_text_addf(&search->name, "%s", spellings[s].behind);
    return true;
}

static bool is_integer(fsdp_dtype dtype)
{
    return dtype == FSDP_U8 || dtype == FSDP_I8 || dtype == FSDP_I32;
}

/* The scale of a tensor of 8 bits, or of packed ones, -1 for none. Exponents of MXFP4 are bytes. */
static int64_t find_scale(scale_search *search, size_t i, bool *is_known_out)
{
    for (int s = 0; s < SPELLINGS; s++) {
        int64_t scale = spell(search, fsdp_sd_at(search->sd, i), s) ? find_named(search) : -1;
        if (scale < 0 || (size_t)scale == i)
            continue;
        const fsdp_entry *tensor = tensor_at(search->sd, (size_t)scale);
        bool is_float = fsdp_dtype_describe(tensor->dtype)->is_float && !is_f8(tensor->dtype);
        if (is_float || (tensor->dtype == FSDP_U8 && strcmp(spellings[s].cut, "_blocks") == 0)) {
            *is_known_out = spellings[s].is_known;
            return scale;
        }
    }
    return -1;
}

static bool is_mxfp4(const scale_search *search, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(search->sd, i);
    return ends(entry->name, entry->name_size, "_blocks");
}

/* The integers that a part of bitsandbytes belongs to, -1 for none. */
static int64_t find_whole(scale_search *search, size_t i)
{
    const fsdp_entry *entry = fsdp_sd_at(search->sd, i);
    for (int p = 0; p < PARTS; p++) {
        if (!ends(entry->name, entry->name_size, parts[p].part))
            continue;
        search->name.size = 0;
        fsdp_text_add(&search->name, entry->name, entry->name_size - strlen(parts[p].part));
        fsdp_text_addf(&search->name, "%s", parts[p].own);
        int64_t whole = find_named(search);
        fsdp_dtype dtype =
            whole >= 0 ? tensor_at(search->sd, (size_t)whole)->dtype : FSDP_DTYPE_NONE;
        if (is_integer(dtype))
            return whole;
    }
    return -1;
}

/* "a.weight' (f8_e4m3fn) with 'a.weight_scale_inv": the list puts it into quotes. */
static void add_pair(scale_search *search, size_t tensor, size_t scale)
{
    const fsdp_entry *first = fsdp_sd_at(search->sd, tensor),
                     *second = fsdp_sd_at(search->sd, scale);
    fsdp_text *text = &search->name;
    text->size = 0;
    fsdp_text_add(text, first->name, first->name_size);
    fsdp_text_addf(text, "' (%s) with '", fsdp_dtype_name(tensor_at(search->sd, tensor)->dtype));
    fsdp_text_add(text, second->name, second->name_size);
    search->no_memory |= text->failed || !fsdp_names_add(&search->found, text->data, text->size);
}

static void check_entry(scale_search *search, size_t i)
{
    const fsdp_selected *selected = &search->selected[i];
    search->report.integers += selected->is_kept && selected->unit == i + 1;
    if (!selected->is_kept || selected->unit || fsdp_sd_at(search->sd, i)->kind == FSDP_ENTRY_VALUE)
        return;
    fsdp_dtype from = tensor_at(search->sd, i)->dtype;
    bool is_known = true;
    if (is_integer(from) && find_scale(search, i, &is_known) >= 0) {
        search->report.integers++;
        search->report.known += is_mxfp4(search, i);
    }
    if (from == selected->dtype)
        return;
    int64_t scale = is_f8(from) && !is_f8(selected->dtype) ? find_scale(search, i, &is_known) : -1;
    int64_t whole = fsdp_dtype_describe(from)->is_float ? find_whole(search, i) : -1;
    search->has_unknown = search->has_unknown || (scale >= 0 && !is_known);
    if (scale >= 0)
        add_pair(search, i, (size_t)scale);
    else if (whole >= 0)
        add_pair(search, (size_t)whole, i);
    search->has_unknown = search->has_unknown || whole >= 0;
}

static fsdp_status fail(const scale_search *search, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "quantized weights are numbers times a scale, and a cast does not "
                          "apply the scale");
    (void)fsdp_names_append(&search->found, "would be cast", &text);
    fsdp_text_addf(&text, search->has_unknown
                              ? "; keep both tensors with --dtype-for 'RE=keep', or dequantize the "
                                "model in its own framework first"
                              : "; make them plain weights with --dequant bf16, or keep both "
                                "tensors with --dtype-for 'RE=keep'");
    fsdp_status st = text.failed ? fsdp_fail_memory(err, "a message")
                                 : fsdp_fail(err, FSDP_ERR_USAGE, "%s", text.data);
    fsdp_text_release(&text);
    return st;
}

fsdp_status fsdp_scales_check(const fsdp_sd *sd, const fsdp_selected *selected,
                              fsdp_scales_report *report_out, fsdp_error *err)
{
    scale_search search = {.sd = sd, .selected = selected};
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && !search.no_memory; i++)
        check_entry(&search, i);
    if (search.no_memory)
        st = fsdp_fail_memory(err, "a list of names");
    else if (search.found.count > 0)
        st = fail(&search, err);
    *report_out = search.report;
    fsdp_names_release(&search.found);
    fsdp_text_release(&search.name);
    return st;
}
