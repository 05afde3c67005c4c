/* Errors: the reason stays however long a path is, and printing one cannot play tricks. */
#include <criterion/criterion.h>

#include <fsdp/status.h>
#include "base/text.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool ends_with(const char *text, const char *end)
{
    return strlen(text) >= strlen(end) && strcmp(text + strlen(text) - strlen(end), end) == 0;
}

Test(status, a_long_path_loses_its_middle_not_the_reason)
{
    char path[4096];
    for (size_t size = 900; size < sizeof path; size += 7) {
        fsdp_error err = {0};
        memset(path, 'p', size);
        memcpy(path, "/first", 6);
        memcpy(path + size - 5, "/last", 6);
        cr_assert_eq(fsdp_fail_errno(&err, ENOSPC, "cannot write '%s' at byte 7", path),
                     FSDP_ERR_NO_SPACE);
        cr_assert(ends_with(err.text, "/last' at byte 7: No space left on device"), "%s", err.text);
        cr_assert_eq(strncmp(err.text, "cannot write '/first", 20), 0);
        cr_assert_eq(strstr(err.text, "...") != NULL, size >= 950, "%zu bytes", size);
        cr_assert_lt(strlen(err.text), sizeof err.text);
    }
}

Test(status, a_thread_that_cannot_be_started_lacks_a_resource)
{
    cr_assert_eq(fsdp_fail_errno(NULL, EAGAIN, "cannot start a thread"), FSDP_ERR_LIMIT);
}

Test(status, a_long_prefix_leaves_the_reason)
{
    char path[4096];
    fsdp_error err = {0};
    memset(path, 'p', sizeof path);
    path[sizeof path - 1] = '\0';
    fsdp_fail_errno(&err, EIO, "cannot read '%s'", path);
    fsdp_error_prefix(&err, "rank 3, '%s'", path);
    cr_assert(ends_with(err.text, "ppp': Input/output error"), "%s", err.text);
    cr_assert_eq(strncmp(err.text, "rank 3, 'ppp", 12), 0);
}

Test(status, no_character_is_cut_in_two)
{
    for (size_t start = 0; start < 8; start++) {
        char path[3000] = "";
        fsdp_error err = {0};
        memset(path, 'a', start);
        for (size_t at = start; at + 4 < sizeof path; at += 4)
            memcpy(path + at, "\xf0\x9f\x98\x80", 4);
        fsdp_fail(&err, FSDP_ERR_NOT_FOUND, "'%s' is not there", path);
        cr_assert(fsdp_utf8_valid(err.text, strlen(err.text)));
        cr_assert(ends_with(err.text, "' is not there"));
    }
}

Test(status, a_report_spells_control_characters_out)
{
    int ends[2];
    char told[400] = "";
    fsdp_error err = {0};
    cr_assert_eq(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    fsdp_fail(&err, FSDP_ERR_NOT_FOUND,
              "no '\x1b]0;t\a\nerror: forged' in 'gr\xc3\xbc\xc3\x9f', '%s'", "\\x1b");
    cr_assert_eq(fsdp_error_report(&err), 3);
    cr_assert_gt(read(ends[0], told, sizeof told - 1), 0);
    cr_assert_str_eq(told, "error: no '\\x1b]0;t\\x07\\x0aerror: forged' in "
                           "'gr\xc3\xbc\xc3\x9f', '\\x1b'\n");
}

Test(status, the_version_is_three_numbers)
{
    int major, minor, patch, end = 0;
    cr_assert_eq(sscanf(fsdp_version(), "%d.%d.%d%n", &major, &minor, &patch, &end), 3);
    cr_assert_eq(fsdp_version()[end], '\0', "%s", fsdp_version());
}
