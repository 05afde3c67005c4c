/*
 * Digests of files: of the source, where a file next to it has them, before it counts as checked; and of the
 * result, as sha256sum computes them, for publishing and for programs that know nothing of checkpoints. The
 * files are read several at a time.
 */
#include "statedict/convert/convert_job.h"

#include "statedict/checkpoint/digests.h"
#include "statedict/manifest/disk_names.h"

#include <string.h>

/* --- the source ---------------------------------------------------------------------------------- */

/* The first finding becomes the error. */
static void keep_first(void *context, const fsdp_finding *finding)
{
    fsdp_error *first = context;
    if (finding->kind == FSDP_FINDING_DAMAGE && first->status == FSDP_OK)
        (void)fsdp_fail(first, FSDP_ERR_DAMAGED, "%s", finding->text);
}

fsdp_status fsdp_convert_compare_digests(const convert_job *job, const fsdp_watch *watch,
                                         fsdp_error *err)
{
    fsdp_error first = {0};
    fsdp_verify_summary summary = {0};
    const fsdp_verify_opts opts = {.level = FSDP_VERIFY_DATA,
                                   .digests = FSDP_DIGESTS_USE,
                                   .threads = job->threads,
                                   .memory = job->opts.memory,
                                   .finding = keep_first,
                                   .finding_context = &first,
                                   .watch = *watch};
    fsdp_status st = fsdp_digests_verify(job->io, job->from->path, &opts, &summary, FSDP_OK, err);
    if (st != FSDP_DIFFERS)
        return st;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "%s", first.text);
}

/* --- the result ---------------------------------------------------------------------------------- */

/* For a result "a/b/", names begin with "b/". */
static fsdp_status list_files(fsdp_file_list *list, const char *to, fsdp_error *err)
{
    char *path, *parent;
    FSDP_TRY(fsdp_path_split(to, &path, &parent, err));
    const char *last = strrchr(path, '/');
    fsdp_status st =
        fsdp_file_list_add_tree(list, path, last ? (size_t)(last - path) + 1 : 0, NULL, err);
    fsdp_file_list_sort(list);
    fsdp_free(path);
    fsdp_free(parent);
    return st;
}

fsdp_status fsdp_convert_digests(const convert_job *job, fsdp_file_digest_visit visit,
                                 void *context, fsdp_error *err)
{
    fsdp_file_list list = {.io = job->io};
    fsdp_digest_opts digest = {.kind = FSDP_DIGEST_SHA256,
                               .threads = job->opts.threads,
                               .memory = job->opts.memory,
                               .watch = &job->opts.watch};
    fsdp_status st = list_files(&list, job->to, err);
    if (st == FSDP_OK)
        st = fsdp_file_list_digest(&list, &digest, err);
    for (size_t i = 0; i < list.count && st == FSDP_OK; i++)
        visit(context, list.items[i].name, list.items[i].digest);
    fsdp_file_list_release(&list);
    return st;
}

fsdp_status fsdp_convert_write_digests(const convert_job *job, fsdp_error *err)
{
    const fsdp_verify_opts writing = {
        .threads = job->opts.threads, .memory = job->opts.memory, .watch = job->opts.watch};
    return fsdp_digests_write(job->io, job->to, &writing, err);
}
