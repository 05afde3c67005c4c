/* The text of digest files, and when they are removed: see digests.h. tests/cli has whole checkpoints. */
#include "statedict/checkpoint/digests.h"

#include "kernels/kernels.h"
#include "statedict/commit/commit_internal.h"
#include "tests/unit/statedict/commit/tiny_checkpoint.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#define ASSERT_OK(call) cr_assert_eq((call), FSDP_OK, "%s", err.text)

/* lines and their last one */
static void finish(const char *lines, fsdp_text *text)
{
    fsdp_text_addf(text, "fsdp-digests 1 xxh3-128\n%s", lines);
    fsdp_hash hash = fsdp_kernels_get()->hash(text->data, text->size);
    fsdp_text_addf(text, "end ");
    fsdp_text_add_hex(text, hash.bytes, sizeof hash.bytes);
    fsdp_text_addf(text, "\n");
}

static fsdp_status decode(const char *data, size_t size, fsdp_error *err)
{
    fsdp_file_list list = {0};
    fsdp_status st = fsdp_digests_decode(data, size, "x.xxh3", &list, err);
    fsdp_file_list_release(&list);
    return st;
}

#define ZEROS "00000000000000000000000000000000"

Test(digests, text_is_read_back)
{
    fsdp_error err = {0};
    fsdp_file_list list = {0}, read = {0};
    fsdp_text text = {0};
    ASSERT_OK(fsdp_file_list_add(&list, "/d/a \"b\"\n", "a \"b\"\n", INT64_MAX, &err));
    ASSERT_OK(fsdp_file_list_add(&list, "/d/deep/c", "deep/c", 0, &err));
    memset(list.items[0].digest, 0xa5, 16);
    ASSERT_OK(fsdp_digests_encode(&list, &text, &err));
    ASSERT_OK(fsdp_digests_decode(text.data, text.size, "x.xxh3", &read, &err));
    cr_assert_eq(read.count, 2);
    for (size_t i = 0; i < read.count; i++) {
        cr_assert_str_eq(read.items[i].name, list.items[i].name);
        cr_assert_eq(read.items[i].size, list.items[i].size);
        cr_assert_arr_eq(read.items[i].digest, list.items[i].digest, 16);
    }
    fsdp_file_list_release(&read);
    fsdp_file_list_release(&list);
    fsdp_text_release(&text);
}

Test(digests, a_name_that_is_not_utf8_is_refused)
{
    fsdp_error err = {0};
    fsdp_file_list list = {0};
    fsdp_text text = {0};
    ASSERT_OK(fsdp_file_list_add(&list, "/d/\xff", "\xff", 1, &err));
    cr_assert_eq(fsdp_digests_encode(&list, &text, &err), FSDP_ERR_USAGE);
    fsdp_file_list_release(&list);
    fsdp_text_release(&text);
}

Test(digests, every_flipped_bit_and_every_cut_is_damage)
{
    fsdp_error err = {0};
    fsdp_text text = {0};
    finish(ZEROS " 12 \"a\"\n" ZEROS " 0 \"b/c\"\n", &text);
    ASSERT_OK(decode(text.data, text.size, &err));
    for (size_t bit = 0; bit < 8 * text.size; bit++) {
        text.data[bit / 8] ^= (char)(1 << bit % 8);
        cr_assert_eq(decode(text.data, text.size, &err), FSDP_ERR_DAMAGED, "bit %zu", bit);
        text.data[bit / 8] ^= (char)(1 << bit % 8);
    }
    for (size_t size = sizeof "fsdp-digests"; size < text.size; size++)
        cr_assert_eq(decode(text.data, size, &err), FSDP_ERR_DAMAGED, "%zu bytes", size);
    fsdp_text_release(&text);
}

Test(digests, lines_that_are_no_files_of_a_checkpoint_are_damage)
{
    static const char *const lines[] = {ZEROS " 1 \"../a\"\n",
                                        ZEROS " 1 \"/a\"\n",
                                        ZEROS " 1 \"a/../b\"\n",
                                        ZEROS " 1 \"a//b\"\n",
                                        ZEROS " 1 \"a/\"\n",
                                        ZEROS " 1 \"./a\"\n",
                                        ZEROS " 1 \"\"\n",
                                        ZEROS " 1 \"..\"\n",
                                        ZEROS " 1 \"a\\u0000b\"\n",
                                        ZEROS " 1 a\n",
                                        ZEROS " 1 \"a\" x\n",
                                        ZEROS " 1 \"a\"",
                                        ZEROS " \"a\"\n",
                                        ZEROS " -1 \"a\"\n",
                                        ZEROS "1 \"a\"\n",
                                        " 1 \"a\"\n",
                                        "\n",
                                        ZEROS " 9223372036854775808 \"a\"\n",
                                        ZEROS " 1 \"b\"\n" ZEROS " 1 \"a\"\n",
                                        ZEROS " 1 \"a\"\n" ZEROS " 1 \"a\"\n"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        fsdp_error err = {0};
        fsdp_text text = {0};
        finish(lines[i], &text);
        cr_assert_eq(decode(text.data, text.size, &err), FSDP_ERR_DAMAGED, "%s: %s", lines[i],
                     err.text);
        fsdp_text_release(&text);
    }
}

Test(digests, other_files_and_newer_versions_are_told_apart)
{
    fsdp_error err = {0};
    fsdp_text text = {0};
    cr_assert_eq(decode("", 0, &err), FSDP_ERR_USAGE);
    cr_assert_eq(decode("XXH3 (a) = 0\n", 13, &err), FSDP_ERR_USAGE);
    fsdp_text_addf(&text, "fsdp-digests 2 xxh3-128\nanything\n");
    fsdp_hash hash = fsdp_kernels_get()->hash(text.data, text.size);
    fsdp_text_addf(&text, "end ");
    fsdp_text_add_hex(&text, hash.bytes, sizeof hash.bytes);
    fsdp_text_addf(&text, "\n");
    cr_assert_eq(decode(text.data, text.size, &err), FSDP_ERR_REFUSED, "%s", err.text);
    fsdp_text_release(&text);
}

/* --- digests are never those of another checkpoint --------------------------------------------- */

static void write_digest_file(fsdp_io *io)
{
    fsdp_error err = {0};
    fsdp_text text = {0};
    finish("", &text);
    ASSERT_OK(fsdp_io_replace_file(io, "/run/c.xxh3", text.data, text.size, &err));
    ASSERT_OK(fsdp_io_sync_dir(io, "/run", &err));
    fsdp_text_release(&text);
}

/* The digests are those of step 4, or of a checkpoint that is gone. */
static void check_digests(fsdp_io *disk, void *user)
{
    const int64_t *old = user;
    if (fsdp_io_exists(disk, "/run/c.xxh3"))
        cr_assert_eq(tiny_read(disk, "/run/c"), *old);
}

static void crash_while_saving(int64_t old)
{
    enum { SEEDS = 64 };
    fsdp_error err = {0};
    fsdp_io *sim = tiny_disk();
    if (old >= 0)
        tiny_must_save(sim, "/run/c", old, false);
    write_digest_file(sim);
    tiny_crashes crashes = {.seeds = SEEDS, .check = check_digests, .user = &old};
    fsdp_io *io = tiny_crash_io(&crashes, sim, sim);
    ASSERT_OK(tiny_save(io, "/run/c", 5, old >= 0, &err));
    cr_assert_not(fsdp_io_exists(sim, "/run/c.xxh3"));
    cr_assert_gt(crashes.points, 5);
    fsdp_io_fault_free(io);
    fsdp_sim_free(sim);
}

Test(digests, a_crash_in_an_overwrite_leaves_none_of_the_old_checkpoint)
{
    crash_while_saving(4);
}

Test(digests, a_crash_in_a_save_leaves_none_of_a_checkpoint_that_was_removed)
{
    crash_while_saving(-1);
}

Test(digests, a_file_of_another_program_stays)
{
    fsdp_error err = {0};
    fsdp_io *sim = tiny_disk();
    ASSERT_OK(fsdp_io_replace_file(sim, "/run/c.xxh3", "mine", 4, &err));
    tiny_must_save(sim, "/run/c", 4, false);
    tiny_must_save(sim, "/run/c", 5, true);
    cr_assert(fsdp_io_exists(sim, "/run/c.xxh3"));
    fsdp_sim_free(sim);
}
