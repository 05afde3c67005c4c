/*
 * The log of a tool (--log FILE): what it says on standard error, for later. A line begins with the time and
 * is one write, so that several programs may share a file.
 */
#include "tools/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct {
    int fd;
    bool open, failed;
    double began;
} file;

bool cli_log_is_open(void)
{
    return file.open;
}

static void add_time(fsdp_text *line)
{
    char text[32];
    time_t now = time(NULL);
    struct tm utc;
    if (!gmtime_r(&now, &utc) || strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0)
        return;
    fsdp_text_addf(line, "%s ", text);
}

/* The work goes on without it. */
static void tell_failure(int errnum)
{
    file.open = false; /* first: this is said, too */
    cli_say("warn", "cannot write to the log: %s; nothing more is written to it", strerror(errnum));
}

static void write_line(const fsdp_text *line)
{
    ssize_t n;
    if (line->failed)
        return;
    do {
        n = write(file.fd, line->data, line->size);
    } while (n < 0 && errno == EINTR);
    if (n != (ssize_t)line->size)
        tell_failure(n < 0 ? errno : ENOSPC);
}

void cli_log(const char *word, const char *text)
{
    fsdp_text line = {0};
    if (!file.open)
        return;
    add_time(&line);
    fsdp_text_addf(&line, "%-5s ", word);
    cli_add_message(&line, text);
    fsdp_text_add(&line, "\n", 1);
    write_line(&line);
    fsdp_text_release(&line);
}

void cli_log_end(int code)
{
    char text[64];
    snprintf(text, sizeof text, "exit %d after %.1f s", code, cli_now() - file.began);
    cli_log("end", text);
}

static fsdp_status open_file(const char *path, fsdp_error *err)
{
    struct stat info;
    int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK;
    file.fd = open(path, flags, 0644);
    if (file.fd < 0 && errno == ELOOP)
        return fsdp_fail(err, FSDP_ERR_REFUSED,
                         "cannot open the log '%s': it is a symbolic link, and those are not "
                         "followed here; name what it leads to",
                         path);
    if (file.fd < 0 && errno == EISDIR)
        return fsdp_fail(err, FSDP_ERR_USAGE, "the log '%s' is a directory: name a file", path);
    if (file.fd < 0 && errno != ENXIO)
        return fsdp_fail_errno(err, errno, "cannot open the log '%s'", path);
    if (file.fd >= 0 && fstat(file.fd, &info) == 0 && S_ISREG(info.st_mode))
        return FSDP_OK;
    return fsdp_fail(err, FSDP_ERR_USAGE, "the log '%s' is not a regular file", path);
}

fsdp_status cli_log_open(const char *path, const char *version, int argc, char **argv,
                         fsdp_error *err)
{
    fsdp_text command = {0};
    file.began = cli_now();
    FSDP_TRY(open_file(path, err));
    file.open = true;
    fsdp_text_addf(&command, "(fsdp %s)", version);
    for (int i = 0; i < argc; i++)
        cli_add_argument(&command, argv[i]);
    if (!command.failed)
        cli_log("begin", command.data);
    fsdp_text_release(&command);
    return FSDP_OK;
}
