/* Code in values and files: see verify_code.h. */
#include "statedict/checkpoint/verify_code.h"

#include "formats/source.h"
#include "statedict/manifest/large_value.h"

#include <string.h>

fsdp_status fsdp_value_code(const fsdp_value *value, fsdp_text *names, fsdp_error *err)
{
    if (value->kind == FSDP_VALUE_OPAQUE)
        return fsdp_source_blob_code(value->as.bytes.data, value->as.bytes.size, names, err);
    bool is_list = value->kind == FSDP_VALUE_LIST || value->kind == FSDP_VALUE_DICT;
    for (size_t i = 0; is_list && i < value->as.list.count; i++)
        FSDP_TRY(fsdp_value_code(&value->as.list.items[i], names, err));
    return FSDP_OK;
}

fsdp_status fsdp_code_report(const fsdp_verify_opts *opts, const char *file, const char *tensor,
                             const fsdp_text *names, fsdp_error *err)
{
    fsdp_text text = {0};
    fsdp_text_addf(&text, "%s%s%s%s%s runs code when a program loads it: %s", file[0] ? "'" : "",
                   file, file[0] ? "'" : "", tensor[0] ? ": " : "", tensor, names->data);
    bool is_whole = !text.failed;
    if (is_whole && opts->finding)
        opts->finding(opts->finding_context, &(fsdp_finding){.file = file,
                                                             .tensor = tensor,
                                                             .block = -1,
                                                             .text = text.data,
                                                             .kind = FSDP_FINDING_CODE});
    fsdp_text_release(&text);
    return is_whole ? FSDP_OK : fsdp_fail_memory(err, "a finding");
}

/* The classes of an entry. A refused call is no damage, because the bytes are as they were saved. */
static fsdp_status find_code(const fsdp_entry *entry, fsdp_text *names, fsdp_error *err)
{
    fsdp_error found = {0};
    if (entry->kind != FSDP_ENTRY_VALUE)
        return FSDP_OK;
    fsdp_status st = fsdp_value_code(&entry->value, names, &found);
    if (st == FSDP_ERR_REFUSED) {
        fsdp_text_addf(names, "%sa call that is refused", names->size > 0 ? ", " : "");
        st = FSDP_OK;
    }
    if (st != FSDP_OK && err)
        *err = found;
    return st == FSDP_OK && names->failed ? fsdp_fail_memory(err, "a finding") : st;
}

fsdp_status fsdp_code_report_values(const fsdp_verify_opts *opts, const fsdp_sd *sd,
                                    const char *manifest, const char *shard, int64_t *files,
                                    fsdp_error *err)
{
    bool in_manifest = false, in_shard = false;
    fsdp_status st = FSDP_OK;
    for (size_t i = 0; i < fsdp_sd_count(sd) && st == FSDP_OK; i++) {
        const fsdp_entry *entry = fsdp_sd_at(sd, i);
        fsdp_text names = {0};
        char name[160];
        st = find_code(entry, &names, err);
        if (st == FSDP_OK && names.size > 0) {
            bool is_large = fsdp_value_is_large(&entry->value);
            fsdp_printable(entry->name, entry->name_size, name, sizeof name);
            st = fsdp_code_report(opts, is_large ? shard : manifest, name, &names, err);
            in_manifest |= !is_large;
            in_shard |= is_large;
        }
        fsdp_text_release(&names);
    }
    *files += in_manifest + (in_shard && (shard[0] || !in_manifest));
    return st;
}
