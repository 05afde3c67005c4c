/*
 * A segment is a memfd: it leaves no name behind and is limited by the host's memory only. It has
 * its final size from the start, sealed so that no access of another rank can fail, and uses pages
 * only where it was written. See transport_shm.h.
 */
#include "runtime/comm_shared/transport_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const size_t most_in_all = (size_t)1 << 45, least = (size_t)64 << 20;

static bool can_map(size_t size)
{
    void *data = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
        return false;
    munmap(data, size);
    return true;
}

/* RLIMIT_FSIZE applies to memfds, too, and kills a process that exceeds it. */
static void choose_size(int ranks, shm_segment *segment)
{
    struct rlimit limit;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = (size_t)ranks;
    size_t size = (size_t)sysconf(_SC_PHYS_PAGES) * page;
    if (size > most_in_all / n)
        size = most_in_all / n;
    segment->is_limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && size > limit.rlim_cur;
    if (segment->is_limited)
        size = limit.rlim_cur;
    while (size > least && !can_map(size * n))
        size /= 2;
    segment->size = size / page * page;
}

/* Keeps segments out of core files, which would contain them once per rank. */
static bool map(shm_segment *segment)
{
    void *data = mmap(NULL, segment->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      segment->fd, 0);
    if (data == MAP_FAILED)
        return false;
    segment->data = data;
    (void)madvise(data, segment->size, MADV_DONTDUMP);
    return true;
}

static fsdp_status give_size(shm_segment *segment, fsdp_error *err)
{
    const unsigned seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (ftruncate(segment->fd, (off_t)segment->size) != 0 ||
        fcntl(segment->fd, F_ADD_SEALS, seals) != 0 || !map(segment))
        return fsdp_fail_errno(err, errno, "cannot make %zu bytes of shared memory", segment->size);
    return FSDP_OK;
}

fsdp_status fsdp_shm_segment_init(int ranks, shm_segment *segment_out, fsdp_error *err)
{
    shm_segment made = {.fd = -1};
    choose_size(ranks, &made);
    if (made.size == 0)
        return fsdp_fail_errno(err, EFBIG, "cannot make shared memory");
    made.fd = memfd_create("fsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made.fd < 0)
        return fsdp_fail_errno(err, errno, "cannot make shared memory");
    fsdp_status status = give_size(&made, err);
    if (status == FSDP_OK)
        *segment_out = made;
    else
        fsdp_shm_segment_close_fd(&made);
    return status;
}

fsdp_status fsdp_shm_segment_map(int fd, int rank, shm_segment *segment_out, fsdp_error *err)
{
    shm_segment made = {.fd = fd};
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS);
    fsdp_status status = FSDP_OK;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &about) != 0 || about.st_size <= 0)
        status = fsdp_fail(err, FSDP_ERR_PEER, "rank %d passed no segment of shared memory", rank);
    if (status == FSDP_OK) {
        made.size = (size_t)about.st_size;
        if (!map(&made))
            status = fsdp_fail_errno(err, errno, "cannot map %zu bytes of shared memory of rank %d",
                                     made.size, rank);
    }
    fsdp_shm_segment_close_fd(&made);
    if (status == FSDP_OK)
        *segment_out = made;
    return status;
}

void fsdp_shm_segment_close_fd(shm_segment *segment)
{
    if (segment->fd >= 0)
        close(segment->fd);
    segment->fd = -1;
}

void fsdp_shm_segment_release(shm_segment *segment)
{
    if (!segment->data)
        return;
    munmap(segment->data, segment->size);
    fsdp_shm_segment_close_fd(segment);
    *segment = (shm_segment){.fd = -1};
}
