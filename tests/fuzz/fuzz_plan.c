/*
 * Fuzz target: plans of conversions. As with the manifest, the hash at the end would stop nearly
 * every changed input, so it is read once as it is and once with the right ending. An accepted
 * plan is compared with a new one; its source, if the plan names it, is a small safetensors file.
 */
#include "base/core/mem.h"
#include "statedict/convert/plan_file.h"
#include "tests/fuzz/closing.h"
#include "tests/fuzz/memory_file.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char model[] =
    "\x40\0\0\0\0\0\0\0"
    "{\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}       "
    "........................";

static void require(bool truth)
{
    if (!truth)
        abort();
}

static void check_order(const fsdp_convert_order *order)
{
    require(order->from && order->to && order->opts.format);
    require(order->opts.world >= 0 && order->opts.shard_dim >= 0 && order->opts.chunk_bytes >= 0);
    for (size_t i = 0; i < order->opts.select.drop_count; i++)
        require(order->opts.select.drops[i] != NULL);
}

static void check_applied(fsdp_io *io)
{
    fsdp_error err = {0};
    fsdp_conversion *conversion;
    const fsdp_convert_opts opts = {.open.access.disk = io};
    fsdp_status status = fsdp_conversion_apply("fuzz/plan.json", &opts, &conversion, &err);
    require(status == FSDP_OK || (err.status == status && err.text[0]));
    fsdp_conversion_close(conversion);
}

static void check_text(const char *text, size_t size)
{
    const memory_entry files[] = {{"plan.json", (const uint8_t *)text, size},
                                  {"model.safetensors", (const uint8_t *)model, sizeof model - 1}};
    fsdp_io *io = memory_folder(files, sizeof files / sizeof *files);
    fsdp_convert_order *order = NULL;
    fsdp_error err = {0};
    fsdp_status status =
        fsdp_convert_order_open("fuzz/plan.json", &(fsdp_access){.disk = io}, &order, &err);
    require(status == FSDP_OK ? order != NULL : !order && err.status == status && err.text[0]);
    if (order)
        check_order(order);
    fsdp_convert_order_close(order);
    check_applied(io);
}

static void check_closed(const char *text, size_t size)
{
    size = size_without_closing(text, size);
    if (size >= 2 && memcmp(text + size - 2, ",\n", 2) == 0) /* which closing adds, too */
        size -= 2;
    fsdp_text closed = {0};
    fsdp_text_add(&closed, text, size);
    if (fsdp_plan_close(&closed, NULL) == FSDP_OK)
        check_text(closed.data, closed.size);
    fsdp_text_release(&closed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = size > 0 ? (const char *)data : "";
    check_text(text, size);
    check_closed(text, size);
    return 0;
}
