/* Tensor names as link names: what the format promises, and that nothing collides. */
#include "formats/hdf5/hdf5_link_name.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static const char *link_of(const char *name, size_t size, uint32_t part)
{
    static char out[FSDP_NATIVE_LINK_ROOM];
    size_t n = fsdp_native_link(name, size, part, out);
    cr_assert_eq(n, strlen(out));
    return out;
}

static void assert_round_trip(const char *name, size_t size, uint32_t part)
{
    char back[FSDP_NATIVE_NAME_PLAIN + 1];
    size_t back_size = 0;
    uint32_t back_part = 0;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_native_name(link_of(name, size, part), back, &back_size, &back_part, &err),
                 FSDP_OK, "%s", err.text);
    cr_assert_eq(back_size, size);
    cr_assert_eq(memcmp(back, name, size), 0);
    cr_assert_eq(back[size], '\0');
    cr_assert_eq(back_part, part);
}

/* Objects of ours begin like "%index"; no tensor's link does. */
static bool is_kept_for_us(const char *link)
{
    char c = link[0] == '%' ? link[1] : '\0';
    return c > 'f' && c <= 'z' && c != 'h';
}

Test(native_name, ordinary_names_stay_as_they_are)
{
    cr_assert_str_eq(link_of("layers.0.attn.wq.weight", 23, 0), "layers.0.attn.wq.weight");
    cr_assert_str_eq(link_of("gr\xC3\xB6\xC3\x9F"
                             "e \n#",
                             10, 0),
                     "gr\xC3\xB6\xC3\x9F"
                     "e \n#");
}

Test(native_name, what_hdf5_refuses_or_confuses_is_escaped)
{
    cr_assert_str_eq(link_of("a/b", 3, 0), "a%2Fb");
    cr_assert_str_eq(link_of("e//g", 4, 0), "e%2F%2Fg");
    cr_assert_str_eq(link_of("100%", 4, 0), "100%25");
    cr_assert_str_eq(link_of("a\0b", 3, 0), "a%00b");
    cr_assert_str_eq(link_of(".", 1, 0), "%2E");
    cr_assert_str_eq(link_of("...", 3, 0), "%2E%2E%2E");
    cr_assert_str_eq(link_of(".a", 2, 0), ".a");
    cr_assert_str_eq(link_of("", 0, 0), "%");
    cr_assert_str_eq(link_of("%index", 6, 0), "%25index");
}

Test(native_name, further_parts_have_a_number)
{
    cr_assert_str_eq(link_of("w", 1, 1), "w%#1");
    cr_assert_str_eq(link_of("w", 1, 4294967295u), "w%#4294967295");
    cr_assert_str_eq(link_of("", 0, 2), "%%#2");
    cr_assert_str_eq(link_of("w%#1", 4, 0), "w%25#1");
}

Test(native_name, long_names_are_hashed)
{
    char name[FSDP_NATIVE_NAME_PLAIN + 1];
    memset(name, '/', sizeof name);
    cr_assert_eq(strlen(link_of(name, FSDP_NATIVE_NAME_PLAIN, 7)), 3u * FSDP_NATIVE_NAME_PLAIN + 3);
    assert_round_trip(name, FSDP_NATIVE_NAME_PLAIN, 4294967295u);
    const char *link = link_of(name, sizeof name, 0);
    cr_assert_eq(strlen(link), 34u);
    cr_assert_eq(strncmp(link, "%h", 2), 0);
    cr_assert_eq(strspn(link + 2, "0123456789abcdef"), 32u);
    char first[FSDP_NATIVE_LINK_ROOM];
    memcpy(first, link, 35);
    name[100] = 'x';
    cr_assert_str_neq(link_of(name, sizeof name, 0), first);
}

Test(native_name, the_name_of_a_hashed_link_is_in_the_index_only)
{
    char name[2000], back[FSDP_NATIVE_NAME_PLAIN + 1];
    memset(name, 'n', sizeof name);
    size_t size = 1;
    uint32_t part = 0;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_native_name(link_of(name, sizeof name, 5), back, &size, &part, &err),
                 FSDP_DIFFERS);
    cr_assert_eq(part, 5u);
    cr_assert_eq(size, 0u);
    cr_assert_eq(fsdp_native_name("%h0123456789ABCDEF0123456789ABCDEF", back, &size, &part, &err),
                 FSDP_ERR_DAMAGED, "other digits than those of a hash");
}

/* All names of up to 4 bytes from the characters that matter, with and without a part. */
Test(native_name, every_short_name_comes_back)
{
    static const char alphabet[] = {'%', '/', '\0', '.', '#', '1', '2', 'E', 'h', 'i'};
    const size_t n = sizeof alphabet;
    for (size_t size = 0; size <= 4; size++) {
        size_t count = 1;
        for (size_t i = 0; i < size; i++)
            count *= n;
        for (size_t code = 0; code < count; code++) {
            char name[4];
            for (size_t i = 0, rest = code; i < size; i++, rest /= n)
                name[i] = alphabet[rest % n];
            assert_round_trip(name, size, (uint32_t)(code % 3));
            cr_assert_not(is_kept_for_us(link_of(name, size, 0)));
        }
    }
}

Test(native_name, links_that_no_name_has_are_refused)
{
    static const char *const links[] = {
        "a/b",    ".",   "..",   "%2f",   "%41", "%",    "a%",      "a%2",
        "a%2G",   "%%",  "w%#0", "w%#01", "w%#", "w%#x", "w%#1%#2", "w%#4294967296",
        "%index", "%h0", "%2Ea", "%25%"};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        char name[FSDP_NATIVE_NAME_PLAIN + 1];
        size_t size = 0;
        uint32_t part = 0;
        fsdp_error err = {0};
        fsdp_status status = fsdp_native_name(links[i], name, &size, &part, &err);
        fsdp_status expected = strcmp(links[i], "%") == 0 ? FSDP_OK : FSDP_ERR_DAMAGED;
        cr_assert_eq(status, expected, "'%s'", links[i]);
    }
}

Test(native_name, a_link_too_long_for_a_name_is_refused)
{
    char link[FSDP_NATIVE_NAME_PLAIN + 3], name[FSDP_NATIVE_NAME_PLAIN + 1];
    memset(link, 'a', sizeof link);
    link[sizeof link - 1] = '\0';
    size_t size = 0;
    uint32_t part = 0;
    cr_assert_eq(fsdp_native_name(link, name, &size, &part, NULL), FSDP_ERR_DAMAGED);
}
