/*
 * Fuzz target: our side of reading HDF5, when the process after the walls has been taken over. The first
 * byte of an input says what the rest is: a listing, or messages of that process with the bytes that it
 * leaves in the shared memory.
 */
#include "base/core/mem.h"
#include "formats/hdf5_child/hdf5_listing.h"
#include "formats/hdf5_child/hdf5_session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FILE_SIZE = 4096, MOST_MESSAGES = 20, PATIENCE_MS = 30000 };

static void require(bool truth)
{
    if (!truth)
        abort();
}

/* --- a file in memory ------------------------------------------------------------------------- */

static fsdp_file the_file;

static int open_memory(fsdp_io *io, const char *path, unsigned flags, fsdp_file **file_out)
{
    (void)io;
    (void)path;
    (void)flags;
    *file_out = &the_file;
    return 0;
}

static ssize_t read_memory(fsdp_file *file, void *data, size_t size, int64_t offset)
{
    (void)file;
    require(offset >= 0 && offset <= FILE_SIZE && size <= (size_t)(FILE_SIZE - offset));
    memset(data, 7, size);
    return (ssize_t)size;
}

static int size_of_memory(fsdp_file *file, int64_t *size_out)
{
    (void)file;
    *size_out = FILE_SIZE;
    return 0;
}

static int close_memory(fsdp_file *file)
{
    (void)file;
    return 0;
}

static int info_of_memory(fsdp_io *io, const char *path, fsdp_file_info *info_out)
{
    (void)io;
    (void)path;
    *info_out = (fsdp_file_info){.kind = FSDP_FILE_REGULAR, .size = FILE_SIZE};
    return 0;
}

static const fsdp_io_ops memory_ops = {.name = "memory",
                                       .open = open_memory,
                                       .pread = read_memory,
                                       .size = size_of_memory,
                                       .close = close_memory,
                                       .info = info_of_memory};

/* --- a listing -------------------------------------------------------------------------------- */

/* Reads every tensor whose data lies in the accepted file. */
static void check_source(fsdp_source *source)
{
    fsdp_source_reader reader = {0};
    for (size_t i = 0; i < fsdp_source_tensor_count(source); i++) {
        const fsdp_source_tensor *tensor = fsdp_source_tensor_at(source, i);
        fsdp_box whole = fsdp_box_whole(tensor->ndim, tensor->shape);
        size_t size = (size_t)fsdp_box_count(&whole) * fsdp_dtype_size(tensor->dtype);
        if (size > FILE_SIZE || tensor->chunk_count == 0 || tensor->chunks[0].file < 0)
            continue;
        char data[FILE_SIZE];
        require(fsdp_source_read(source, i, &whole, data, &reader, NULL) == FSDP_OK);
    }
    fsdp_source_reader_release(&reader);
}

static void run_listing(const uint8_t *data, size_t size)
{
    fsdp_io io = {.ops = &memory_ops};
    fsdp_source *source = NULL;
    fsdp_h5_tensors tensors = {0};
    fsdp_error err = {0};
    int file;
    the_file.ops = &memory_ops;
    require(fsdp_source_create(&io, "fuzz", "hdf5", &source, &err) == FSDP_OK);
    require(fsdp_source_add_file(source, "fuzz", false, &file, &err) == FSDP_OK);
    const fsdp_h5_place place = {.file = file,
                                 .stream = FSDP_NO_STREAM,
                                 .size = fsdp_source_file_size(source, (size_t)file)};
    fsdp_status status =
        fsdp_h5_listing_take((const char *)data, size, source, &place, &tensors, &err);
    if (status == FSDP_OK)
        status = fsdp_source_complete(source, &err);
    if (status == FSDP_OK)
        check_source(source);
    else
        require(err.status == status && err.text[0]);
    fsdp_h5_tensors_release(&tensors);
    fsdp_source_close(source);
}

/* --- messages --------------------------------------------------------------------------------- */

static fsdp_status bring(void *user, void *data, size_t size, int64_t offset, fsdp_error *err)
{
    (void)user;
    (void)err;
    return read_memory(NULL, data, size, offset) < 0 ? FSDP_ERR_IO : FSDP_OK;
}

/* Sends the messages, each cut to a length that an input chooses, and returns what is left of it. */
static void send_messages(int channel, const uint8_t **data, size_t *size)
{
    for (int i = 0; i<MOST_MESSAGES && * size> 25; i++) {
        fsdp_h5_message message = {.kind = (*data)[0]};
        memcpy(&message.status, *data + 1, 4);
        memcpy(&message.number, *data + 5, 8);
        memcpy(&message.size, *data + 13, 8);
        size_t length = (*data)[21] == 1 ? (*data)[22] : sizeof message;
        (void)send(channel, &message, length, MSG_DONTWAIT | MSG_NOSIGNAL);
        *data += 25;
        *size -= 25;
    }
}

static void run_messages(const uint8_t *data, size_t size)
{
    static unsigned char *shared;
    const fsdp_h5_file_view view = {"fuzz", FILE_SIZE, bring, NULL, false};
    fsdp_h5_session *session = NULL;
    fsdp_text listing = {0};
    fsdp_error err = {0};
    int channels[2];
    shared = shared ? shared : fsdp_alloc(1, FSDP_H5_SHARED);
    require(shared && socketpair(AF_UNIX, SOCK_SEQPACKET, 0, channels) == 0);
    require(fsdp_h5_session_adopt(&view, channels[0], shared, PATIENCE_MS, &session, &err) ==
            FSDP_OK);
    send_messages(channels[1], &data, &size);
    memcpy(shared + FSDP_H5_FILE_ROOM, data, size < FSDP_H5_REPLY_ROOM ? size : FSDP_H5_REPLY_ROOM);
    shutdown(channels[1], SHUT_WR);
    fsdp_status status = fsdp_h5_session_list(session, 1 << 16, &listing, &err);
    require(status == FSDP_OK ? listing.size <= 1 << 16 : err.status == status && err.text[0]);
    char bytes[24];
    const fsdp_box box = {.ndim = 2, .len = {2, 3}};
    const fsdp_h5_request wanted = {.box = &box, .size = sizeof bytes};
    err = (fsdp_error){0};
    status = fsdp_h5_session_read(session, &wanted, bytes, &err);
    require(status == FSDP_OK || (err.status == status && err.text[0]));
    fsdp_h5_session_stop(session);
    fsdp_text_release(&listing);
    close(channels[0]);
    close(channels[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    if (data[0] % 2 == 0)
        run_listing(data + 1, size - 1);
    else
        run_messages(data + 1, size - 1);
    return 0;
}
