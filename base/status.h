/*
 * Status codes and the error that travels with them.
 *
 * Every function that can fail returns an fsdp_status and takes an fsdp_error *err as its last argument,
 * which may be NULL. The first function that knows what went wrong fills it in; its callers forward it.
 * If an object, name, path or output is NULL, a call returns FSDP_ERR_USAGE and names the argument, or, if
 * it returns no status, 0, false or NULL. A call that frees accepts NULL. NULL options are the defaults.
 * There is no global "last error". A call that fails leaves nothing to release: its outputs are NULL, zero
 * or unchanged. A status is also the exit code of a tool that ends with it.
 */
#ifndef FSDP_STATUS_H
#define FSDP_STATUS_H

#if defined(__GNUC__)
#define FSDP_API __attribute__((visibility("default")))
#define FSDP_CHECKED __attribute__((warn_unused_result))
#define FSDP_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define FSDP_API
#define FSDP_CHECKED
#define FSDP_PRINTF(text, first)
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fsdp_status {
    FSDP_OK = 0,
    FSDP_DIFFERS = 1,          /* a negative answer: differs, damaged (verify), nothing matched */
    FSDP_ERR_USAGE = 2,        /* a wrong argument or a contradiction between arguments */
    FSDP_ERR_NOT_FOUND = 3,    /* the input does not exist, or its format is not recognised */
    FSDP_ERR_DAMAGED = 4,      /* input damaged or incomplete */
    FSDP_ERR_REFUSED = 5,      /* input refused for safety */
    FSDP_ERR_EXISTS = 6,       /* output exists, or another job is using the directory */
    FSDP_ERR_NO_SPACE = 7,     /* no space, quota or file-size limit */
    FSDP_ERR_IO = 8,           /* any other I/O error */
    FSDP_ERR_LIMIT = 9,        /* memory or another resource */
    FSDP_ERR_PEER = 10,        /* another rank failed or did not answer in time */
    FSDP_ERR_INTERNAL = 70,    /* a bug of the library: please report it */
    FSDP_ERR_CANCELLED = 75    /* the caller asked to stop */
} fsdp_status;

enum { FSDP_ERROR_TEXT = 1000 };

/* Zero-initialise on the stack: fsdp_error err = {0}. Nothing to release. */
typedef struct fsdp_error {
    fsdp_status status;
    int rank;                  /* the rank that failed, in a collective call */
    int errnum;                /* errno of the failed call, 0 if none */
    char text[FSDP_ERROR_TEXT];
} fsdp_error;

/* Forwards a failure of call to the caller of the enclosing function. */
#define FSDP_TRY(call)                       \
    do {                                     \
        fsdp_status try_status_ = (call);    \
        if (try_status_ != FSDP_OK)          \
            return try_status_;              \
    } while (0)

/* Writes "error: TEXT" to standard error, unless the status is FSDP_OK, and returns the exit code. Control
 * characters are spelled out, so that a path cannot change the terminal. */
FSDP_API int fsdp_error_report(const fsdp_error *err);

/* Returns one or two words for a status, e.g. "damaged". Never NULL. */
FSDP_API const char *fsdp_status_name(fsdp_status status);

/* Returns the version of the library, "0.1.0". */
FSDP_API const char *fsdp_version(void);

/* Fills err (unless it is NULL) and returns status, so that a failing function ends in one line. A text that
 * is too long is cut in the middle, so that it keeps the reason at its end. */
FSDP_API fsdp_status fsdp_fail(fsdp_error *err, fsdp_status status, const char *format, ...)
    FSDP_PRINTF(3, 4);

/* Fills err for a failed system call and returns the status that errnum stands for. Appends errnum's text. */
FSDP_API fsdp_status fsdp_fail_errno(fsdp_error *err, int errnum, const char *format, ...)
    FSDP_PRINTF(3, 4);

/* Puts "CONTEXT: " before the text of an error that a lower layer filled in. */
FSDP_API void fsdp_error_prefix(fsdp_error *err, const char *format, ...) FSDP_PRINTF(2, 3);

#ifdef __cplusplus
}
#endif
#endif
