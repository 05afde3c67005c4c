/* Connects ranks that another launcher started: finds the host and port of the rendezvous. See
 * launch_internal.h. */
#include "runtime/launch/launch_internal.h"

#include <stdio.h>

#include "base/core/clock.h"
#include "runtime/bootstrap/rendezvous.h"
#include "runtime/bootstrap/torchrun_store.h"

enum { NAME_SIZE = FSDP_JOB_SIZE + 32 };

/* The context of the rendezvous' callbacks. */
typedef struct address {
    const fsdp_place *place;
    bool is_one_host;
    char name[NAME_SIZE]; /* in torchrun's store */
} address;

static const char *host_of(const address *to)
{
    return to->is_one_host ? FSDP_LOOPBACK : to->place->host;
}

static fsdp_status find_known(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                              int64_t until_ms, fsdp_error *err)
{
    const address *to = context;
    (void)until_ms;
    (void)err;
    snprintf(host_out, FSDP_HOST_SIZE, "%s", host_of(to));
    *port_out = to->place->port;
    return FSDP_OK;
}

static fsdp_status publish_in_store(void *context, int port, int64_t until_ms, fsdp_error *err)
{
    const address *to = context;
    char value[16];
    snprintf(value, sizeof value, "%d", port);
    return fsdp_store_set(to->place->host, to->place->port, to->name, value, until_ms, err);
}

static fsdp_status find_in_store(void *context, char host_out[FSDP_HOST_SIZE], int *port_out,
                                 int64_t until_ms, fsdp_error *err)
{
    const address *to = context;
    char value[FSDP_STORE_VALUE];
    snprintf(host_out, FSDP_HOST_SIZE, "%s", host_of(to));
    FSDP_TRY(fsdp_store_get(to->place->host, to->place->port, to->name, value, until_ms, err));
    if (fsdp_parse_int(value, 1, 65535, port_out))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_DAMAGED, "torchrun's store does not name a port: '%.32s'",
                     value);
}

static fsdp_rendezvous_spec spec_of(const address *to, int deadline_ms)
{
    const fsdp_place *place = to->place;
    return (fsdp_rendezvous_spec){.rank = place->rank,
                                  .size = place->size,
                                  .job = place->job,
                                  .is_one_host = to->is_one_host,
                                  .deadline_ms = deadline_ms,
                                  .listener = -1,
                                  .port = place->has_store ? 0 : place->port,
                                  .publish = place->has_store ? publish_in_store : NULL,
                                  .find = place->has_store ? find_in_store : find_known,
                                  .context = (void *)to};
}

fsdp_status fsdp_launch_connect(const fsdp_place *place, int deadline_ms, fsdp_ctl **ctl_out,
                                fsdp_error *err)
{
    address to = {.place = place};
    to.is_one_host = place->local_size == place->size || fsdp_host_is_loopback(place->host);
    snprintf(to.name, sizeof to.name, "fsdp/%s", place->job);
    fsdp_rendezvous_spec spec = spec_of(&to, deadline_ms);
    fsdp_status status = fsdp_rendezvous(&spec, ctl_out, err);
    /* a restarted job must not find the old port; if it does, it tries again */
    if (status == FSDP_OK && place->has_store && place->rank == 0) {
        fsdp_error ignored = {0};
        (void)!fsdp_store_delete(place->host, place->port, to.name, fsdp_now_ms() + deadline_ms,
                                 &ignored);
    }
    return status;
}
