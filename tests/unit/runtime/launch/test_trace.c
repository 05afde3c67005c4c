/* The trace of a rank: lines as documented, files as they should be. */
#include "base/io/io.h"
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/mem.h"
#include "runtime/launch/trace.h"

static char folder[] = "/tmp/fsdp-trace-XXXXXX";

static void make_folder(void)
{
    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(chdir(folder), 0);
}

static void drop_folder(void)
{
    cr_assert_eq(fsdp_io_remove_tree(NULL, folder, NULL), FSDP_OK);
}

TestSuite(trace, .init = make_folder, .fini = drop_folder);

static void expect_file(const char *path, const char *text)
{
    char read[2000] = "";
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file, "%s", path);
    (void)!fread(read, 1, sizeof read - 1, file);
    fclose(file);
    cr_assert_str_eq(read, text);
}

static void add_example(fsdp_trace *trace)
{
    int ranks[] = {0, 1};
    const fsdp_comm comm = {.size = 2, .ranks = ranks};
    const fsdp_collective gather = {.kind = FSDP_ALL_GATHER, .dtype = FSDP_F32, .count = 1190};
    const fsdp_collective reduce = {
        .kind = FSDP_REDUCE_SCATTER, .dtype = FSDP_BF16, .count = 7, .op = FSDP_REDUCE_PREMUL_SUM};
    fsdp_trace_add(
        trace, &(fsdp_trace_event){
                   .event = "unshard", .unit = "layers.1", .state = "pre_backward", .bytes = -1});
    fsdp_trace_step(trace, 3);
    fsdp_trace_add(trace, &(fsdp_trace_event){.event = "all_gather",
                                              .unit = "a\"b",
                                              .comm = &comm,
                                              .call = &gather,
                                              .stream = "all_gather",
                                              .bytes = 9520});
    fsdp_trace_add(trace, &(fsdp_trace_event){.event = "reduce_scatter",
                                              .unit = "root",
                                              .comm = &comm,
                                              .call = &reduce,
                                              .stream = "reduce_scatter",
                                              .bytes = 28});
}

Test(trace, spells_the_lines_as_documented)
{
    fsdp_trace *trace = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_trace_open("t-%r-%r.json", 5, &trace, &err), FSDP_OK, "%s", err.text);
    add_example(trace);
    cr_assert_eq(fsdp_trace_close(trace, &err), FSDP_OK, "%s", err.text);
    expect_file("t-5-5.json",
                "{\"n\":0,\"rank\":5,\"step\":0,\"event\":\"unshard\",\"unit\":\"layers.1\","
                "\"state\":\"pre_backward\"}\n"
                "{\"n\":1,\"rank\":5,\"step\":3,\"event\":\"all_gather\",\"unit\":\"a\\\"b\","
                "\"group\":[0,1],\"op\":\"\",\"dtype\":\"f32\",\"count\":1190,\"bytes\":9520,"
                "\"stream\":\"all_gather\"}\n"
                "{\"n\":2,\"rank\":5,\"step\":3,\"event\":\"reduce_scatter\",\"unit\":\"root\","
                "\"group\":[0,1],\"op\":\"premul_sum\",\"dtype\":\"bf16\",\"count\":7,"
                "\"bytes\":28,\"stream\":\"reduce_scatter\"}\n");
}

Test(trace, replaces_an_older_one_and_no_file_that_a_link_leads_to)
{
    fsdp_trace *trace = NULL;
    fsdp_error err = {0};
    FILE *file = fopen("other", "w");
    fputs("precious\n", file);
    fclose(file);
    cr_assert_eq(symlink("other", "t"), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(fsdp_trace_open("t", 0, &trace, &err), FSDP_OK, "%s", err.text);
        cr_assert_eq(fsdp_trace_close(trace, &err), FSDP_OK);
    }
    expect_file("t", "");
    expect_file("other", "precious\n");
}

Test(trace, leaves_what_is_no_file_alone)
{
    fsdp_trace *trace = NULL;
    fsdp_error err = {0};
    struct stat info;
    cr_assert_eq(mkfifo("pipe", 0600), 0);
    cr_assert_eq(fsdp_trace_open("pipe", 0, &trace, &err), FSDP_ERR_EXISTS);
    cr_assert(strstr(err.text, "'pipe'"), "%s", err.text);
    cr_assert_eq(stat("pipe", &info), 0);
    cr_assert_eq(fsdp_trace_open("no/t", 0, &trace, &err), FSDP_ERR_NOT_FOUND);
}

static void count(void *user, const fsdp_trace_event *event)
{
    (void)event;
    ++*(int *)user;
}

Test(trace, tells_a_listener_without_a_file)
{
    fsdp_trace *trace = NULL;
    int n = 0;
    cr_assert_eq(fsdp_trace_open(NULL, 0, &trace, NULL), FSDP_OK);
    fsdp_trace_set_listener(trace, count, &n);
    add_example(trace);
    cr_assert_eq(n, 3);
    cr_assert_eq(fsdp_trace_close(trace, NULL), FSDP_OK);
    fsdp_trace_add(NULL, NULL);
    fsdp_trace_step(NULL, 1);
    cr_assert_eq(fsdp_trace_close(NULL, NULL), FSDP_OK);
}

Test(trace, reports_its_first_failed_write_when_it_is_closed)
{
    fsdp_trace *trace = NULL;
    fsdp_error err = {0};
    cr_assert_eq(fsdp_trace_open("t", 0, &trace, &err), FSDP_OK);
    (void)fsdp_mem_fail_after(0, true);
    add_example(trace);
    (void)fsdp_mem_fail_after(-1, false);
    cr_assert_eq(fsdp_trace_close(trace, &err), FSDP_ERR_LIMIT);
    cr_assert_eq(fsdp_trace_open("t", 0, &trace, &err), FSDP_OK);
    (void)fsdp_trace_close(trace, &err);
}
