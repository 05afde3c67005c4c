/* A source that another program writes to while it is read, so that the result would be a mixture; and one
 * that cannot be read. */
#include "base/io/io.h"
#include "tests/support/disk/io_fault.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TENSORS = 2, TENSOR_BYTES = 1 << 20 };

static char directory[64], source[100], target[100];
static fsdp_error err;

static void write_source(const char *path, char value)
{
    char *data = malloc(TENSOR_BYTES), header[300] = {0};
    FILE *out = fopen(path, "wb");
    int size = snprintf(header + 8, sizeof header - 8,
                        "{\"a\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]},"
                        "\"b\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}",
                        TENSOR_BYTES, TENSOR_BYTES, TENSOR_BYTES, TENSOR_BYTES, 2 * TENSOR_BYTES);
    header[0] = (char)size; /* below 256 */
    header[1] = (char)(size >> 8);
    cr_assert(out && data && fwrite(header, 1, (size_t)size + 8, out) == (size_t)size + 8);
    memset(data, value, TENSOR_BYTES);
    for (int i = 0; i < TENSORS; i++)
        cr_assert_eq(fwrite(data, 1, TENSOR_BYTES, out), TENSOR_BYTES);
    cr_assert_eq(fclose(out), 0);
    free(data);
}

static void begin(void)
{
    strcpy(directory, "/tmp/fsdp-changes-XXXXXX");
    cr_assert(mkdtemp(directory));
    snprintf(source, sizeof source, "%s/source.safetensors", directory);
    snprintf(target, sizeof target, "%s/target", directory);
    write_source(source, 1);
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(source_changes, .init = begin, .fini = end);

/* --- what the other program does --------------------------------------------------------------- */

static void overwrite(void)
{
    int fd = open(source, O_WRONLY);
    cr_assert_eq(pwrite(fd, "\2", 1, 400), 1);
    cr_assert_eq(close(fd), 0);
}

static void replace(void)
{
    char other[110];
    snprintf(other, sizeof other, "%s.new", source);
    write_source(other, 2);
    cr_assert_eq(rename(other, source), 0);
}

static void extend(void)
{
    int fd = open(source, O_WRONLY | O_APPEND);
    cr_assert_eq(write(fd, "\2", 1), 1);
    cr_assert_eq(close(fd), 0);
}

static void do_nothing(void)
{
}

typedef struct intruder {
    void (*act)(void);
    bool has_acted;
} intruder;

static int act_once(void *user, int64_t done, int64_t total, const char *what)
{
    intruder *other = user;
    (void)total;
    (void)what;
    if (done > 0 && !other->has_acted) {
        other->has_acted = true;
        other->act();
    }
    return 0;
}

static fsdp_status convert_beside(void (*act)(void), const char *format)
{
    intruder other = {.act = act};
    const fsdp_convert_opts opts = {.format = format,
                                    .watch = {.context = &other, .progress = act_once}};
    err = (fsdp_error){0};
    usleep(20000); /* times of files have the kernel's ticks */
    fsdp_status st = fsdp_checkpoint_convert(source, target, &opts, &err);
    cr_assert(other.has_acted);
    return st;
}

/* --- conversions ------------------------------------------------------------------------------- */

static void expect_refusal(void (*act)(void), const char *format)
{
    struct stat about;
    cr_expect_eq(convert_beside(act, format), FSDP_ERR_DAMAGED, "%s: %s", format, err.text);
    cr_expect(strstr(err.text, "changed while it was read"), "%s", err.text);
    cr_expect_neq(stat(target, &about), 0, "%s: there is a result", format);
}

Test(source_changes, no_conversion_of_a_mixture_is_published)
{
    static const char *const formats[] = {"fsdp", "dcp", "hf"};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        expect_refusal(overwrite, formats[i]);
        expect_refusal(replace, formats[i]);
        expect_refusal(extend, formats[i]);
        write_source(source, 1);
    }
}

Test(source_changes, a_source_that_stays_is_converted)
{
    cr_expect_eq(convert_beside(do_nothing, "fsdp"), FSDP_OK, "%s", err.text);
}

Test(source_changes, verifying_notices_the_change)
{
    intruder other = {.act = overwrite};
    const fsdp_verify_opts opts = {.level = FSDP_VERIFY_DATA,
                                   .watch = {.context = &other, .progress = act_once}};
    usleep(20000);
    cr_expect_eq(fsdp_checkpoint_verify(source, &opts, NULL, &err), FSDP_DIFFERS, "%s", err.text);
}

/* --- a disk that fails ------------------------------------------------------------------------- */

/* Bytes that could not be read are not damage: a script may try again. */
Test(source_changes, a_source_that_cannot_be_read_is_not_called_damaged)
{
    fsdp_verify_summary summary = {0};
    fsdp_status st = FSDP_ERR_IO;
    int64_t unreadable = 0;
    for (int n = 1; st != FSDP_OK; n++) {
        fsdp_io *io;
        fsdp_fault_plan plan = {.calls = 1 << FSDP_CALL_PREAD,
                                .at = n,
                                .forever = true,
                                .action = FSDP_FAULT_ERRNO,
                                .errnum = EIO};
        cr_assert_eq(fsdp_io_fault_create(NULL, &plan, &io, &err), FSDP_OK);
        const fsdp_verify_opts opts = {.level = FSDP_VERIFY_DATA, .access.disk = io};
        st = fsdp_checkpoint_verify(source, &opts, &summary, &err);
        cr_assert(st == FSDP_OK || st == FSDP_ERR_IO, "read %d: %s", n, err.text);
        cr_expect_eq(summary.unreadable, summary.findings, "read %d", n);
        unreadable += summary.unreadable;
        fsdp_io_fault_free(io);
    }
    cr_expect_gt(unreadable, 0, "no read of a tensor failed");
}
