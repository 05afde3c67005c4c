/* How an export is cut: parts are boxes of entries, slabs are pieces of parts, numbered through. */
#include "statedict/convert/export_internal.h"

#include "statedict/checkpoint/foreign.h"

enum { SLAB_MOST = 16 << 20 };

void fsdp_export_divide_memory(export_job *job)
{
    int64_t memory = job->opts->memory > 0 ? job->opts->memory : FSDP_MEMORY_DEFAULT;
    bool encoded = job->from->info.compressed;
    int most;
    int64_t apart;
    fsdp_foreign_reading_limits(job->from, &most, &apart);
    job->threads = fsdp_getters_within(job->opts->threads, memory / 2, encoded);
    most = apart / FSDP_EXPORT_SLAB_LEAST < most ? (int)(apart / FSDP_EXPORT_SLAB_LEAST) : most;
    job->threads = most < 1 ? 1 : most < job->threads ? most : job->threads;
    int64_t slab = (memory / 2 < apart ? memory / 2 : apart) / job->threads;
    job->slab_bytes = slab < FSDP_EXPORT_SLAB_LEAST ? FSDP_EXPORT_SLAB_LEAST
                      : slab > SLAB_MOST            ? SLAB_MOST
                                                    : slab;
}

static int64_t slab_elements(const export_job *job, size_t entry)
{
    return job->slab_bytes / (int64_t)fsdp_export_element_room(job, entry);
}

fsdp_status fsdp_export_number_slabs(export_job *job, fsdp_error *err)
{
    for (size_t i = 0; i < fsdp_sd_count(job->sd); i++) {
        const fsdp_target_entry *entry = &job->entries[i];
        for (size_t b = 0; b < entry->box_count; b++) {
            const int64_t *len = entry->boxes[b].len;
            fsdp_slabs slabs = {0};
            fsdp_box slab;
            job->parts[job->part_count++] = (export_part){i, b, job->slab_count};
            while (fsdp_slabs_next(&slabs, entry->ndim, len, slab_elements(job, i), &slab))
                job->slab_count++;
        }
    }
    job->hashes = fsdp_alloc((size_t)job->slab_count, sizeof *job->hashes);
    return job->hashes ? FSDP_OK : fsdp_fail_memory(err, "a conversion");
}

static const export_part *find_part(const export_job *job, int64_t number)
{
    size_t low = 0, high = job->part_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (job->parts[middle].first_slab <= number)
            low = middle;
        else
            high = middle;
    }
    return &job->parts[low];
}

void fsdp_export_find_slab(const export_job *job, int64_t number, export_slab *slab)
{
    const export_part *part = find_part(job, number);
    const fsdp_target_entry *entry = &job->entries[part->entry];
    const fsdp_target_box *box = &entry->boxes[part->box];
    fsdp_slabs slabs = {0};
    *slab = (export_slab){.entry = part->entry, .box_number = part->box};
    for (int64_t i = part->first_slab; i <= number; i++) {
        slab->first = slabs.next;
        fsdp_slabs_next(&slabs, entry->ndim, box->len, slab_elements(job, part->entry), &slab->box);
    }
    slab->count = slabs.next - slab->first;
    for (int d = 0; d < entry->ndim; d++)
        slab->box.lo[d] += box->lo[d];
}

size_t fsdp_export_slab_size(const export_job *job, const export_slab *slab)
{
    return (size_t)slab->count * fsdp_dtype_size(job->entries[slab->entry].dtype);
}
