/* XXH3-128 and SHA-256: published values, all variants alike, any splitting gives the same value. */
#include "kernels/kernels.h"
#include "kernels/variants.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void to_hex(char *text, const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
}

static uint8_t *random_bytes(size_t size, unsigned seed)
{
    uint8_t *bytes = malloc(size);
    srand(seed);
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(rand() >> 8);
    return bytes;
}

/* --- XXH3-128 --- */

/* The buffer of xxHash's own sanity test. */
static void fill_sanity_buffer(uint8_t *buf, size_t size)
{
    uint64_t generator = 2654435761u;
    for (size_t i = 0; i < size; i++) {
        buf[i] = (uint8_t)(generator >> 56);
        generator *= 11400714785074694797u;
    }
}

Test(kernels_hash, values_are_those_of_the_xxhash_sanity_test)
{
    static const struct {
        size_t size;
        const char *hex;
    } known[] = {
        {0, "99aa06d3014798d86001c324468d497f"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb"},
        {6, "082afe0b8162d12a3e7039bdda43cfc6"},    {12, "6e3efd8fc7802b18061a192713f69ad9"},
        {24, "0ce966e4678d37611e7044d28b1b901d"},   {48, "a002ac4e5478227ef942219aed80f67b"},
        {81, "4952f58181ab00425e8bafb9f95fb803"},   {222, "337e09641b948717f1aebd597cec6b3a"},
        {403, "1b6de21e332dd73dcdeb804d65c6dea4"},  {512, "18d2d110dcc9bca1617e49599013cb6b"},
        {2048, "f736557fd47073a5dd59e2c3a5f038e0"}, {2240, "ccb134fbfa7ce49d6e73a90539cf2948"},
        {2367, "e89c0f6ff369b427cb37aeb9e5d361ed"},
    };
    const fsdp_kernels *tables[8];
    size_t count = fsdp_kernels_all(tables, 8);
    uint8_t buf[2367];
    fill_sanity_buffer(buf, sizeof buf);
    for (size_t t = 0; t < count; t++) {
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
            char hex[33];
            to_hex(hex, tables[t]->hash(buf, known[i].size).bytes, 16);
            cr_assert_str_eq(hex, known[i].hex, "%s, %zu bytes", tables[t]->name, known[i].size);
        }
    }
}

Test(kernels_hash, all_variants_agree_at_every_length)
{
    enum { SIZE = 3000 };
    const fsdp_kernels *tables[8];
    size_t count = fsdp_kernels_all(tables, 8);
    uint8_t *bytes = random_bytes(SIZE + 8, 1);
    for (size_t size = 0; size < SIZE; size++) {
        fsdp_hash plain = tables[0]->hash(bytes + size % 8, size);
        for (size_t t = 1; t < count; t++) {
            fsdp_hash other = tables[t]->hash(bytes + size % 8, size);
            cr_assert_arr_eq(plain.bytes, other.bytes, 16, "%s, %zu bytes", tables[t]->name, size);
        }
    }
    free(bytes);
}

Test(kernels_hash, pieces_of_any_size_give_the_value_of_the_whole)
{
    enum { SIZE = 300000 };
    uint8_t *bytes = random_bytes(SIZE, 2);
    fsdp_hasher *hasher = fsdp_hasher_create();
    for (int round = 0; round < 60; round++) {
        size_t size = (size_t)rand() % SIZE, most = 1 + (size_t)rand() % (round % 2 ? 100 : 100000);
        fsdp_hasher_reset(hasher);
        for (size_t done = 0; done < size;) {
            size_t piece = (size_t)rand() % most + (most == 1);
            piece = piece < size - done ? piece : size - done;
            fsdp_hasher_add(hasher, bytes + done, piece);
            done += piece;
        }
        fsdp_hash whole = fsdp_kernels_get()->hash(bytes, size), pieces = fsdp_hasher_value(hasher);
        cr_assert_arr_eq(whole.bytes, pieces.bytes, 16, "%zu bytes", size);
    }
    fsdp_hasher_free(hasher);
    free(bytes);
}

Test(kernels_hash, a_value_may_be_taken_and_more_added)
{
    fsdp_hasher *hasher = fsdp_hasher_create();
    fsdp_hash empty = fsdp_hasher_value(hasher), whole = fsdp_kernels_get()->hash(NULL, 0);
    cr_assert_arr_eq(empty.bytes, whole.bytes, 16);
    fsdp_hasher_add(hasher, "abc", 3);
    fsdp_hasher_value(hasher);
    fsdp_hasher_add(hasher, "def", 3);
    fsdp_hash pieces = fsdp_hasher_value(hasher);
    whole = fsdp_kernels_get()->hash("abcdef", 6);
    cr_assert_arr_eq(pieces.bytes, whole.bytes, 16);
    fsdp_hasher_free(hasher);
    fsdp_hasher_free(NULL);
}

/* --- SHA-256 --- */

static void check_sha256(const char *message, size_t repeats, const char *expected)
{
    fsdp_sha256 sha;
    uint8_t digest[32];
    char hex[65];
    fsdp_sha256_init(&sha);
    for (size_t i = 0; i < repeats; i++)
        fsdp_sha256_add(&sha, message, strlen(message));
    fsdp_sha256_value(&sha, digest);
    to_hex(hex, digest, sizeof digest);
    cr_assert_str_eq(hex, expected);
}

Test(kernels_hash, sha256_values_are_those_of_the_standard)
{
    check_sha256("", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_sha256("abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    check_sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
                 "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    check_sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                 "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
                 1, "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    check_sha256("aaaaaaaaaa", 100000,
                 "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

Test(kernels_hash, sha256_of_pieces_is_that_of_the_whole)
{
    enum { SIZE = 1000 };
    uint8_t *bytes = random_bytes(SIZE, 3);
    for (size_t size = 0; size < SIZE; size++) {
        fsdp_sha256 whole, pieces;
        uint8_t a[32], b[32];
        fsdp_sha256_init(&whole);
        fsdp_sha256_init(&pieces);
        fsdp_sha256_add(&whole, bytes, size);
        for (size_t done = 0; done < size;) {
            size_t piece = 1 + (size_t)rand() % 150;
            piece = piece < size - done ? piece : size - done;
            fsdp_sha256_add(&pieces, bytes + done, piece);
            done += piece;
        }
        fsdp_sha256_value(&whole, a);
        fsdp_sha256_value(&pieces, b);
        cr_assert_arr_eq(a, b, 32, "%zu bytes", size);
    }
    free(bytes);
}

Test(kernels_hash, sha256_variants_agree)
{
    uint8_t *bytes = random_bytes(64 * 40 + 1, 4);
    for (size_t blocks = 0; blocks < 40; blocks++) {
        uint32_t plain[8], chosen[8];
        for (int i = 0; i < 8; i++)
            plain[i] = chosen[i] = (uint32_t)rand();
        fsdp_sha256_blocks_c(plain, bytes + blocks % 2, blocks);
        fsdp_sha256_blocks_get()(chosen, bytes + blocks % 2, blocks);
        cr_assert_arr_eq(plain, chosen, sizeof plain, "%zu blocks", blocks);
    }
    free(bytes);
}
