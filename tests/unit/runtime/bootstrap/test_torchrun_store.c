/* The client of torchrun's store against a fake store: its requests, and the answers that it
 * accepts. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "runtime/bootstrap/socket.h"
#include "runtime/bootstrap/torchrun_store.h"

enum { SHORT_MS = 300, LONG_MS = 20000 };

/* Expects bytes, answers bytes, twice; then closes. */
typedef struct fake_store {
    int listener, port;
    const char *expected[2], *answers[2];
    size_t expected_size[2], answer_size[2];
    bool is_right, stays;
    pthread_t thread;
} fake_store;

static void *serve(void *user)
{
    fake_store *store = user;
    char came[256];
    fsdp_error err = {0};
    int64_t until_ms = fsdp_now_ms() + LONG_MS;
    store->is_right = fsdp_socket_wait(store->listener, 1, until_ms);
    int fd = fsdp_socket_accept(store->listener);
    for (int i = 0; i < 2 && store->is_right; i++) {
        store->is_right =
            fsdp_socket_recv_all(fd, came, store->expected_size[i], until_ms, &err) == FSDP_OK &&
            memcmp(came, store->expected[i], store->expected_size[i]) == 0;
        (void)!fsdp_socket_send_all(fd, store->answers[i], store->answer_size[i], until_ms, &err);
    }
    while (store->stays && fsdp_socket_recv_all(fd, came, 1, until_ms, &err) == FSDP_OK)
        ; /* until the client disconnects */
    fsdp_socket_close(&fd);
    return NULL;
}

static void start_store(fake_store *store)
{
    fsdp_error err = {0};
    cr_assert_eq(fsdp_socket_listen(FSDP_LOOPBACK, 0, &store->listener, &err), FSDP_OK, "%s",
                 err.text);
    store->port = fsdp_socket_port(store->listener);
    cr_assert_eq(pthread_create(&store->thread, NULL, serve, store), 0);
}

static void end_store(fake_store *store)
{
    pthread_join(store->thread, NULL);
    fsdp_socket_close(&store->listener);
}

#define BYTES(text) text, sizeof text - 1
#define HELLO "\0\316\367\205\74"
#define KEY "\3\0\0\0\0\0\0\0/ab"
#define WAIT "\6\1\0\0\0\0\0\0\0" KEY

static fake_store store_of(const char *first, size_t first_size, const char *answer,
                           size_t answer_size)
{
    return (fake_store){.expected = {first, ""},
                        .expected_size = {first_size, 0},
                        .answers = {answer, ""},
                        .answer_size = {answer_size, 0}};
}

Test(torchrun_store, set_waits_until_the_value_is_there)
{
    fsdp_error err = {0};
    fake_store store = store_of(BYTES(HELLO "\1" KEY "\2\0\0\0\0\0\0\0xy" WAIT), BYTES("\0"));
    start_store(&store);
    cr_assert_eq(
        fsdp_store_set(FSDP_LOOPBACK, store.port, "ab", "xy", fsdp_now_ms() + LONG_MS, &err),
        FSDP_OK, "%s", err.text);
    end_store(&store);
    cr_assert(store.is_right);
}

Test(torchrun_store, get_waits_then_asks)
{
    char value[FSDP_STORE_VALUE];
    fsdp_error err = {0};
    fake_store store = store_of(BYTES(HELLO WAIT), BYTES("\0"));
    store.expected[1] = "\3" KEY;
    store.expected_size[1] = sizeof "\3" KEY - 1;
    store.answers[1] = "\4\0\0\0\0\0\0\0port";
    store.answer_size[1] = 12;
    start_store(&store);
    cr_assert_eq(
        fsdp_store_get(FSDP_LOOPBACK, store.port, "ab", value, fsdp_now_ms() + LONG_MS, &err),
        FSDP_OK, "%s", err.text);
    end_store(&store);
    cr_assert(store.is_right);
    cr_assert_str_eq(value, "port");
}

Test(torchrun_store, delete_takes_the_count)
{
    fsdp_error err = {0};
    fake_store store = store_of(BYTES(HELLO "\10" KEY), BYTES("\1\0\0\0\0\0\0\0"));
    start_store(&store);
    cr_assert_eq(fsdp_store_delete(FSDP_LOOPBACK, store.port, "ab", fsdp_now_ms() + LONG_MS, &err),
                 FSDP_OK, "%s", err.text);
    end_store(&store);
    cr_assert(store.is_right);
}

static void expect_no_value(fake_store *store, const char *text)
{
    char value[FSDP_STORE_VALUE];
    fsdp_error err = {0};
    start_store(store);
    cr_assert_neq(
        fsdp_store_get(FSDP_LOOPBACK, store->port, "ab", value, fsdp_now_ms() + SHORT_MS, &err),
        FSDP_OK);
    end_store(store);
    cr_assert(strstr(err.text, "torchrun's store at 127.0.0.1 port"), "%s", err.text);
    cr_assert(strstr(err.text, text), "%s", err.text);
}

Test(torchrun_store, that_is_none_or_silent_is_an_error)
{
    fake_store gone = store_of(BYTES(HELLO WAIT), BYTES(""));
    expect_no_value(&gone, "the connection broke");
    fake_store silent = store_of(BYTES(HELLO WAIT), BYTES(""));
    silent.stays = true;
    expect_no_value(&silent, "it did not answer in time");
    fake_store large = store_of(BYTES(HELLO WAIT), BYTES("\0\377\377\377\377\0\0\0\0"));
    large.stays = true;
    expect_no_value(&large, "it sent a malformed answer");
    fake_store cancelled = store_of(BYTES(HELLO WAIT), BYTES("\1\1\0\0\0\0\0\0\0x"));
    cancelled.stays = true;
    expect_no_value(&cancelled, "it sent a malformed answer");
}

Test(torchrun_store, names_that_are_too_long_are_refused)
{
    char name[3000];
    fsdp_error err = {0};
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    cr_assert_eq(fsdp_store_set(FSDP_LOOPBACK, 1, name, "v", fsdp_now_ms(), &err), FSDP_ERR_USAGE);
}
