/* Makes files of SentencePiece: see piece_file.h. */
#include "tests/support/piece_file.h"

#include <string.h>

void piece_file_add_varint(fsdp_text *out, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        fsdp_text_add(out, (const char[]){(char)(value | 0x80)}, 1);
    fsdp_text_add(out, (const char[]){(char)value}, 1);
}

void piece_file_add_number(fsdp_text *out, unsigned field, uint64_t value)
{
    piece_file_add_varint(out, field << 3);
    piece_file_add_varint(out, value);
}

void piece_file_add_bytes(fsdp_text *out, unsigned field, const char *data, size_t size)
{
    piece_file_add_varint(out, field << 3 | 2);
    piece_file_add_varint(out, size);
    fsdp_text_add(out, data, size);
}

void piece_file_add_piece(fsdp_text *out, const char *text, float score, unsigned type)
{
    fsdp_text piece = {0};
    piece_file_add_bytes(&piece, 1, text, strlen(text));
    piece_file_add_varint(&piece, 2 << 3 | 5);
    fsdp_text_add(&piece, (const char *)&score, sizeof score);
    if (type > 0)
        piece_file_add_number(&piece, 3, type);
    piece_file_add_bytes(out, 1, piece.data, piece.size);
    fsdp_text_release(&piece);
}

void piece_file_add_trainer(fsdp_text *out, unsigned field, uint64_t value)
{
    fsdp_text trainer = {0};
    piece_file_add_number(&trainer, field, value);
    piece_file_add_bytes(out, 2, trainer.data, trainer.size);
    fsdp_text_release(&trainer);
}

void piece_file_add_specials(fsdp_text *out)
{
    piece_file_add_piece(out, "<unk>", 0, FSDP_PIECE_UNKNOWN);
    piece_file_add_piece(out, "<s>", 0, FSDP_PIECE_CONTROL);
    piece_file_add_piece(out, "</s>", 0, FSDP_PIECE_CONTROL);
}

void piece_file_make(fsdp_text *out)
{
    piece_file_add_specials(out);
    piece_file_add_piece(out, "<pad>", 0, FSDP_PIECE_CONTROL);
    piece_file_add_piece(out, "\xE2\x96\x81tool\xE2\x96\x81", 0, FSDP_PIECE_USER_DEFINED);
    piece_file_add_piece(out, "<0x0A>", 0, FSDP_PIECE_BYTE);
    piece_file_add_piece(out, "\xE2\x96\x81\x61", -1, 0);
    piece_file_add_piece(out, "a", -2.5F, FSDP_PIECE_NORMAL);
    piece_file_add_piece(out, "b", -3, FSDP_PIECE_UNUSED);
    piece_file_add_trainer(out, 3, FSDP_PIECE_BPE);
    piece_file_add_trainer(out, 43, 3);
    piece_file_add_bytes(out, 4, "unknown", 7);
}
