/* tokenizer.model of SentencePiece: its pieces, and what is refused. */
#include "formats/sentencepiece.h"

#include "tests/support/piece_file.h"

#include <criterion/criterion.h>
#include <string.h>

static fsdp_text model;
static fsdp_sentencepiece pieces;
static fsdp_error err;

static void end(void)
{
    fsdp_text_release(&model);
    fsdp_sentencepiece_release(&pieces);
}

TestSuite(sentencepiece, .fini = end);

static fsdp_status read_model(void)
{
    fsdp_sentencepiece_release(&pieces);
    return fsdp_sentencepiece_read(model.data, model.size, "t.model", 1000, &pieces, &err);
}

Test(sentencepiece, a_file_has_pieces_and_their_roles)
{
    piece_file_make(&model);
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert_eq(pieces.count, 9);
    cr_assert_eq(pieces.model, FSDP_PIECE_BPE);
    cr_assert_eq(memcmp(pieces.pieces[7].text, "a", 1), 0);
    cr_assert_eq(pieces.pieces[7].size, 1);
    cr_assert_eq(pieces.pieces[7].score, -2.5F);
    cr_assert_eq(pieces.pieces[6].type, FSDP_PIECE_NORMAL);
    cr_assert_eq(pieces.pieces[8].type, FSDP_PIECE_UNUSED);
    cr_assert(pieces.unk == 0 && pieces.bos == 1 && pieces.eos == 2 && pieces.pad == 3);
    cr_assert(pieces.adds_space);
}

Test(sentencepiece, a_role_belongs_to_a_control_piece_or_to_none)
{
    piece_file_add_piece(&model, "a", 0, 0);
    piece_file_add_piece(&model, "<unk>", 0, FSDP_PIECE_UNKNOWN);
    piece_file_add_trainer(&model, 43, UINT64_MAX); /* -1: none */
    piece_file_add_bytes(&model, 3, "\x18\0", 2);
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert_eq(pieces.model, FSDP_PIECE_UNIGRAM, "that of files that do not say");
    cr_assert(pieces.unk == 1 && pieces.bos == -1 && pieces.eos == -1 && pieces.pad == -1);
    cr_assert_not(pieces.adds_space);
}

Test(sentencepiece, a_file_says_how_it_treats_text)
{
    piece_file_add_specials(&model);
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert(pieces.adds_space && pieces.merges_spaces, "what files mean that do not say");
    cr_assert(!pieces.keeps_spaces && !pieces.ends_words && !pieces.charsmap);
    piece_file_add_bytes(&model, 3, "\x12\x03map\x20\0\x28\0", 9);
    piece_file_add_trainer(&model, 24, 1);
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert(!pieces.merges_spaces && pieces.keeps_spaces && pieces.ends_words);
    cr_assert_eq(pieces.charsmap_size, 3);
    cr_assert_eq(memcmp(pieces.charsmap, "map", 3), 0);
}

Test(sentencepiece, fields_that_are_not_known_are_skipped)
{
    piece_file_add_specials(&model);
    piece_file_add_varint(&model, 7 << 3 | 1);
    fsdp_text_add(&model, "12345678", 8);
    piece_file_add_varint(&model, 8 << 3 | 5);
    fsdp_text_add(&model, "1234", 4);
    piece_file_add_number(&model, 9, UINT64_MAX);
    cr_assert_eq(read_model(), FSDP_OK, "%s", err.text);
    cr_assert_eq(pieces.count, 3);
}

/* Appends the bytes to a good file, and reads it. */
static void expect_damage(const char *data, size_t size, const char *why)
{
    fsdp_text_release(&model);
    piece_file_add_specials(&model);
    fsdp_text_add(&model, data, size);
    cr_assert_eq(read_model(), FSDP_ERR_DAMAGED, "%s", why);
    cr_assert_not_null(strstr(err.text, why), "%s, not: %s", err.text, why);
    cr_assert_not_null(strstr(err.text, "'t.model'"), "%s", err.text);
}

#define DAMAGE(bytes, why) expect_damage(bytes, sizeof bytes - 1, why)

Test(sentencepiece, hostile_bytes_are_refused_with_their_place)
{
    DAMAGE("\x0A", "byte 46: a number is cut off");
    DAMAGE("\x08\xFF\xFF", "a number is cut off");
    DAMAGE("\x28\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x02", "more than 64 bits");
    DAMAGE("\x0A\x05\x0A", "byte 45: a field is longer");
    DAMAGE("\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01", "a field is longer");
    DAMAGE("\x0A\x03\x0A\x02\x61", "byte 47: a field is longer"); /* than the piece */
    DAMAGE("\x29\x01\x02", "a field is longer");
    DAMAGE("\x2B\x2C", "a field is a group");
    DAMAGE("\x2C", "a field is a group");
    DAMAGE("\x2E", "unknown wire type");
    DAMAGE("\x02\x00", "a number that no field may have");
    DAMAGE("\xFA\xFF\xFF\xFF\x7F\x00", "a number that no field may have");
    DAMAGE("\x08\x05", "'a part of the model' has the wire type 0");
    DAMAGE("\x0A\x02\x08\x05", "'piece' has the wire type 0");
    DAMAGE("\x0A\x05\x0A\x01\x61\x10\x01", "'score' has the wire type 0");
    DAMAGE("\x0A\x05\x0A\x01\x61\x1A\x00", "'type' has the wire type 2");
    DAMAGE("\x0A\x00", "a piece has no text");
    DAMAGE("\x0A\x03\x0A\x01\xFF", "not UTF-8");
    DAMAGE("\x0A\x08\x0A\x01\x61\x15\x00\x00\xC0\x7F", "the score of a piece is not finite");
    DAMAGE("\x0A\x08\x0A\x01\x61\x15\x00\x00\x80\xFF", "the score of a piece is not finite");
    DAMAGE("\x0A\x05\x0A\x01\x61\x18\x07", "a piece has an unknown type");
    DAMAGE("\x0A\x05\x0A\x01\x61\x18\x02", "second piece of the type UNKNOWN");
    DAMAGE("\x12\x02\x18\x05", "'model_type' is unknown");
    DAMAGE("\x12\x02\x1A\x00", "'model_type' has the wire type 2");
    DAMAGE("\x12\x03\xC8\x02\x03", "'bos_id' is 3, and there are 3 pieces");
    DAMAGE("\x12\x03\xD0\x02\x09", "'eos_id' is 9");
    DAMAGE("\x12\x07\xD8\x02\xFF\xFF\xFF\xFF\x0F", "more than 32 bits");
    DAMAGE("\x1A\x02\x1A\x00", "'add_dummy_prefix' has the wire type 2");
}

Test(sentencepiece, a_file_that_is_cut_off_is_refused_anywhere_within_a_field)
{
    piece_file_make(&model);
    size_t whole = model.size;
    int accepted = 0;
    for (model.size = 0; model.size < whole; model.size++)
        accepted += read_model() == FSDP_OK;
    cr_assert_eq(accepted, 11, "only ends of fields behind the first piece end a file: %d",
                 accepted);
}

Test(sentencepiece, pieces_are_limited_and_one_is_unknown)
{
    piece_file_add_piece(&model, "a", 0, 0);
    cr_assert_eq(read_model(), FSDP_ERR_DAMAGED);
    cr_assert_not_null(strstr(err.text, "it has 1 pieces, but no piece has the type UNKNOWN"), "%s",
                       err.text);
    piece_file_add_specials(&model);
    fsdp_sentencepiece_release(&pieces);
    cr_assert_eq(fsdp_sentencepiece_read(model.data, model.size, "t", 3, &pieces, &err),
                 FSDP_ERR_LIMIT);
}

Test(sentencepiece, tiktoken_is_known_by_its_first_line)
{
    static const char *const lists[] = {"IQ== 0\nIg== 1\n", "IQ== 0", "ISEh 12\r\n"};
    static const char *const others[] = {"",        "IQ==", "IQ== ",     "IQ== x",
                                         "IQ= 0\n", " 0\n", "IQ== 0 1\n"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        cr_assert(fsdp_sentencepiece_is_tiktoken(lists[i], strlen(lists[i])), "%zu", i);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_assert_not(fsdp_sentencepiece_is_tiktoken(others[i], strlen(others[i])), "%zu", i);
    piece_file_make(&model);
    cr_assert_not(fsdp_sentencepiece_is_tiktoken(model.data, model.size));
}
