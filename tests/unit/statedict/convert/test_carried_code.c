/* Values of a native checkpoint that run code when they are loaded: no conversion copies them unasked. */
#include "base/io/io.h"

#include <criterion/criterion.h>
#include <fsdp/fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char directory[64], source[100], target[100];
static fsdp_error err;

/* A legacy torch.save file of one object. */
#define SAVED(pickle)                                                                      \
    "\x80\2\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\2M\xe9\3.\x80\2}." pickle \
    "\x80\2]."
#define OBJECT "\x80\2cmy.mod\nC\n)\x81."
#define SHELL "\x80\2cos\nsystem\n(S'x'\ntR."

static void begin(void)
{
    strcpy(directory, "/tmp/fsdp-code-XXXXXX");
    cr_assert(mkdtemp(directory));
    snprintf(source, sizeof source, "%s/source", directory);
    snprintf(target, sizeof target, "%s/target", directory);
}

static void end(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, directory, NULL), FSDP_OK);
}

TestSuite(carried_code, .init = begin, .fini = end);

static void save_value(const fsdp_value *value, const fsdp_value *other)
{
    fsdp_sd *sd = NULL;
    fsdp_ctl *ctl = NULL;
    cr_assert_eq(fsdp_sd_create(&sd, &err), FSDP_OK);
    cr_assert_eq(fsdp_ctl_self(&ctl, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_add_value(sd, "object", 6, value, &err), FSDP_OK);
    if (other)
        cr_assert_eq(fsdp_sd_add_value(sd, "other", 5, other, &err), FSDP_OK);
    cr_assert_eq(fsdp_sd_save(sd, ctl, source, &(fsdp_save_opts){.overwrite = true}, &err), FSDP_OK,
                 "%s", err.text);
    fsdp_ctl_free(ctl);
    fsdp_sd_free(sd);
}

static fsdp_value opaque_value(const char *bytes, size_t size)
{
    fsdp_value value = {0};
    cr_assert_eq(fsdp_value_set_bytes(&value, FSDP_VALUE_OPAQUE, bytes, size, &err), FSDP_OK);
    return value;
}

static void save(const char *bytes, size_t size)
{
    fsdp_value value = opaque_value(bytes, size);
    save_value(&value, NULL);
    fsdp_value_release(&value);
}

#define SAVE(bytes) save(bytes, sizeof(bytes) - 1)

static fsdp_status convert(const char *format, fsdp_opaque opaque)
{
    err = (fsdp_error){0};
    return fsdp_checkpoint_convert(
        source, target, &(fsdp_convert_opts){.format = format, .opaque = opaque, .overwrite = true},
        &err);
}

Test(carried_code, an_object_is_copied_on_request_only)
{
    static const char *const formats[] = {"dcp", "hdf5", "fsdp"};
    SAVE(SAVED(OBJECT));
    for (int i = 0; i < 3; i++) {
        cr_expect_eq(convert(formats[i], FSDP_OPAQUE_REFUSE), FSDP_ERR_USAGE, "%s", formats[i]);
        cr_expect(strstr(err.text, "'object (my.mod.C)'"), "%s", err.text);
        cr_expect_not(fsdp_io_exists(NULL, target));
    }
    for (int i = 1; i < 3; i++) {
        cr_expect_eq(convert(formats[i], FSDP_OPAQUE_COPY), FSDP_OK, "%s", err.text);
        cr_assert_eq(fsdp_io_remove_tree(NULL, target, NULL), FSDP_OK);
    }
}

Test(carried_code, an_object_that_is_left_out_is_not_carried)
{
    const fsdp_value other = fsdp_value_i64(1);
    fsdp_value object = opaque_value(OBJECT, sizeof(OBJECT) - 1);
    fsdp_convert_opts opts = {.format = "fsdp"};
    save_value(&object, &other);
    cr_expect_eq(fsdp_checkpoint_convert(source, target, &opts, &err), FSDP_ERR_USAGE);
    opts.select.exclude = "^object$";
    cr_expect_eq(fsdp_checkpoint_convert(source, target, &opts, &err), FSDP_OK, "%s", err.text);
    fsdp_value_release(&object);
}

/* Items of DCP are zips: the plan refuses other bytes, before the re-read would. */
Test(carried_code, the_plan_of_dcp_refuses_bytes_that_are_no_zip)
{
    static const struct {
        const char *bytes;
        size_t size;
    } cases[] = {{SAVED(OBJECT), sizeof SAVED(OBJECT) - 1},
                 {SAVED("\x80\2K\1."), sizeof SAVED("\x80\2K\1.") - 1},
                 {"PK\3\4 and no archive", 19},
                 {"\1\2\3", 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsdp_conversion *conversion;
        save(cases[i].bytes, cases[i].size);
        fsdp_convert_opts opts = {.format = "dcp", .opaque = FSDP_OPAQUE_COPY};
        err = (fsdp_error){0};
        cr_expect_eq(fsdp_conversion_open(source, target, &opts, &conversion, &err), FSDP_ERR_USAGE,
                     "%zu: %s", i, err.text);
        fsdp_conversion_close(conversion);
        cr_expect(strstr(err.text, "not a zip of torch.save"), "%s", err.text);
        cr_expect_eq(convert("dcp", FSDP_OPAQUE_COPY), FSDP_ERR_USAGE, "%s", err.text);
        cr_expect_not(fsdp_io_exists(NULL, target));
    }
}

/* No option carries a call that would have refused the file in which it was stored. */
Test(carried_code, a_call_that_no_checkpoint_may_have_is_refused)
{
    static const char *const formats[] = {"dcp", "hdf5", "fsdp"};
    SAVE(SAVED(SHELL));
    for (int i = 0; i < 6; i++) {
        cr_expect_eq(convert(formats[i / 2], (fsdp_opaque)(i % 2)), FSDP_ERR_REFUSED, "%s",
                     formats[i / 2]);
        cr_expect(strstr(err.text, "'object'") && strstr(err.text, "os.system"), "%s", err.text);
    }
}

/* A plan allows what its options allow, and another one nothing more. */
Test(carried_code, a_plan_names_it_and_does_not_allow_it)
{
    fsdp_conversion *conversion;
    fsdp_convert_opts opts = {.format = "fsdp", .opaque = FSDP_OPAQUE_COPY};
    SAVE(SAVED(OBJECT));
    cr_assert_eq(fsdp_conversion_open(source, target, &opts, &conversion, &err), FSDP_OK, "%s",
                 err.text);
    const fsdp_convert_plan *plan = fsdp_conversion_plan(conversion);
    const fsdp_convert_note *note = plan->notes;
    while (note < plan->notes + plan->note_count && note->kind != FSDP_NOTE_CODE)
        note++;
    cr_assert(note < plan->notes + plan->note_count && note->count == 1 && note->item_count == 1);
    cr_expect_str_eq(note->items[0].name, "object");
    cr_expect_str_eq(note->items[0].other, "my.mod.C");
    fsdp_conversion_close(conversion);
    opts.opaque = FSDP_OPAQUE_REFUSE;
    cr_expect_eq(fsdp_checkpoint_convert(source, target, &opts, &err), FSDP_ERR_USAGE);
    cr_expect(strstr(err.text, "'object (my.mod.C)'"), "%s", err.text);
    cr_expect_not(fsdp_io_exists(NULL, target));
}

Test(carried_code, every_form_of_pickle_is_seen)
{
    SAVE(OBJECT);
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_ERR_USAGE, "a bare pickle");
    SAVE(SHELL);
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_COPY), FSDP_ERR_REFUSED, "a bare pickle");
    SAVE("PK\3\4 and no archive");
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_ERR_USAGE, "a zip that nobody can read");
    fsdp_value object = opaque_value(OBJECT, sizeof(OBJECT) - 1);
    fsdp_value list = {.kind = FSDP_VALUE_LIST, .as.list = {&object, 1}};
    save_value(&list, NULL);
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_ERR_USAGE, "inside a list");
    fsdp_value pair[] = {fsdp_value_i64(1), object};
    fsdp_value dict = {.kind = FSDP_VALUE_DICT, .as.list = {pair, 2}};
    save_value(&dict, NULL);
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_ERR_USAGE, "inside a dict");
    fsdp_value_release(&object);
}

Test(carried_code, values_without_code_are_copied)
{
    SAVE("\1\2\3");
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_OK, "%s", err.text);
    SAVE("\x80\2N.");
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_OK, "%s", err.text);
    SAVE("\x80 is no pickle");
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_OK, "%s", err.text);
    SAVE(SAVED("\x80\2c__builtin__\nset\n(]K\1atR."));
    cr_expect_eq(convert("fsdp", FSDP_OPAQUE_REFUSE), FSDP_OK, "%s", err.text);
}

typedef struct seen {
    int count;
    char file[64], tensor[64], text[200];
} seen;

static void on_finding(void *context, const fsdp_finding *finding)
{
    seen *found = context;
    found->count += finding->kind == FSDP_FINDING_CODE;
    snprintf(found->file, sizeof found->file, "%s", finding->file);
    snprintf(found->tensor, sizeof found->tensor, "%s", finding->tensor);
    snprintf(found->text, sizeof found->text, "%s", finding->text);
}

static fsdp_verify_summary verify(seen *found)
{
    fsdp_verify_summary summary = {0};
    cr_assert_eq(fsdp_checkpoint_verify(
                     source, &(fsdp_verify_opts){.finding = on_finding, .finding_context = found},
                     &summary, &err),
                 FSDP_OK, "%s", err.text);
    return summary;
}

Test(carried_code, verify_says_which_file_holds_it)
{
    seen found = {0};
    SAVE(SAVED(OBJECT));
    fsdp_verify_summary summary = verify(&found);
    cr_expect_eq(found.count, 1);
    cr_expect_eq(summary.code_files, 1);
    cr_expect_str_eq(found.file, "manifest.json");
    cr_expect_str_eq(found.tensor, "object");
    cr_expect(strstr(found.text, "my.mod.C"), "%s", found.text);
    SAVE(SAVED(SHELL));
    summary = verify(&found);
    cr_expect(strstr(found.text, "a call that is refused"), "%s", found.text);
    SAVE("\1\2\3");
    summary = verify(&(seen){0});
    cr_expect_eq(summary.code_files, 0);
}

/* Over 64 KiB it lies in the shard file. */
Test(carried_code, verify_finds_it_in_a_shard_file)
{
    static const char head[] = SAVED("\x80\2cmy.mod\nC\n)\x81");
    size_t room = 100000, used = sizeof head - 1 - 4; /* without the end of the last pickle */
    char *bytes = calloc(room + 100, 1);
    seen found = {0};
    memcpy(bytes, head, used);
    bytes[used++] = 'B';
    memcpy(bytes + used, &(uint32_t){(uint32_t)room - 1000}, 4);
    used += 4 + room - 1000;
    memcpy(bytes + used, "b.\x80\2].", 6);
    save(bytes, used + 6);
    fsdp_verify_summary summary = verify(&found);
    cr_expect_eq(summary.code_files, 1);
    cr_expect_str_eq(found.file, "shard-00000-of-00001.h5");
    fsdp_value large = opaque_value(bytes, used + 6);
    fsdp_value small = opaque_value(OBJECT, sizeof(OBJECT) - 1);
    save_value(&large, &small);
    summary = verify(&found);
    cr_expect_eq(summary.code_files, 2, "the manifest, too");
    fsdp_value_release(&large);
    fsdp_value_release(&small);
    free(bytes);
}
