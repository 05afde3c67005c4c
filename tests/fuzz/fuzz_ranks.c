/* Fuzz target: rank files, which are read as Meta's parts, too. The input is the size of the first rank's
 * pickle (two bytes, little-endian), that pickle and the second rank's; around each a zip archive with three
 * storages is put. */
#include "base/core/bytes.h"
#include "tests/fuzz/memory_file.h"
#include "tests/fuzz/tiny_zip.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { RANKS = 2 };

static uint8_t *make_file(const uint8_t *pickle, size_t size, size_t *size_out)
{
    static const uint8_t storage[24] = {0, 0, 0, 0, 1};
    const tiny_record records[] = {{"archive/data.pkl", pickle, size},
                                   {"archive/data/0", storage, sizeof storage},
                                   {"archive/data/1", storage, 8},
                                   {"archive/data/2", storage, 12}};
    return tiny_zip(records, sizeof records / sizeof *records, size_out);
}

static void read_parts(uint8_t *const made[RANKS], const size_t sizes[RANKS])
{
    static const uint8_t params[] = "{\"dim\": 2, \"n_heads\": 1}";
    const memory_entry files[] = {{"consolidated.00.pth", made[0], sizes[0]},
                                  {"consolidated.01.pth", made[1], sizes[1]},
                                  {"params.json", params, sizeof params - 1}};
    fsdp_source *source = NULL;
    fsdp_error err = {0};
    if (fsdp_source_open(memory_folder(files, 3), "fuzz/consolidated.{r}.pth", NULL, &source,
                         &err) == FSDP_OK)
        read_source(source);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    size_t first = fsdp_load_u16(data), rest = size - 2, sizes[RANKS];
    first = first < rest ? first : rest;
    uint8_t *made[RANKS] = {make_file(data + 2, first, &sizes[0]),
                            make_file(data + 2 + first, rest - first, &sizes[1])};
    const memory_entry files[RANKS] = {{"rank_0.pt", made[0], sizes[0]},
                                       {"rank_1.pt", made[1], sizes[1]}};
    if (made[0] && made[1])
        read_everything(memory_folder(files, RANKS));
    if (made[0] && made[1])
        read_parts(made, sizes);
    free(made[0]);
    free(made[1]);
    return 0;
}
