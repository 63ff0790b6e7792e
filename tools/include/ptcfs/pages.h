/* The pages that have an open file's bytes, for C and C++ programs on Linux. Nothing is linked.
 *
 *   int file = open("/mnt/ptc/llama/current/rank/3/model.safetensors", O_RDONLY);
 *   int pages = ptcfs_pages(file);                    // or -1
 *   void *bytes = mmap(NULL, size, PROT_READ, MAP_SHARED, pages >= 0 ? pages : file, 0);
 *   cuMemHostRegister(bytes, size, CU_MEMHOSTREGISTER_READ_ONLY);  // where the GPU can
 *   cuMemcpyHtoDAsync(target, bytes, size, stream);   // at the rate of the link
 *
 * A file in memory (tmpfs) can be pinned for a device for as long as it is mapped. Where ptcfs runs
 * as root on Linux 6.9 or newer, a mapping of the file in the mount is one of that file already.
 * Elsewhere this gives a descriptor of it: for reading alone, whatever rights who has it has to the
 * file; or, to the user who runs the daemon, of a file below incoming/ that is open for reading and
 * writing, for both. As long as such a one is open or mapped nothing can be committed of its
 * directory. Which GPUs register memory that is only to be read says
 * CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED: on others a file that may not be written
 * is read into pinned memory.
 *
 * The mount may go on without it: map the file in the mount then. errno says why there is none.
 *
 *   - EALREADY: not needed, as said above, and the file is in a tmpfs
 *   - ENOTTY: not a file of ptcfs, or of one that is older
 *   - EOPNOTSUPP: its bytes are not in one file here: they are computed, or on another node; the
 *     store is on a disk; the job has a limit of space; or it is open for writing alone
 *   - EPERM: it is open for writing, and the daemon runs as another user; or the memory of a GPU,
 *     and the caller is neither root, who runs the daemon, nor its owner
 *   - EBUSY: too many ask at once
 *   - others, of socket(2), connect(2), recvmsg(2): as in a container without the socket's
 *     directory
 */
#ifndef PTCFS_PAGES_H
#define PTCFS_PAGES_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

/* What the ioctl answers: a ticket, which the socket changes for a descriptor, once, within ten
 * seconds, for the user who asked. */
struct ptcfs_page_ticket {
  uint32_t version; /* 1 */
  uint32_t kind;    /* 0: the stored file; 1: memory of a GPU of NVIDIA's */
  unsigned char token[16];
  char socket[80];          /* a path */
  unsigned char device[16]; /* which GPU: cuDeviceGetUuid */
  uint64_t bytes;           /* of its memory, that are mapped */
};
#define PTCFS_GET_PAGES _IOR('P', 0x74, struct ptcfs_page_ticket)

/* The descriptor for a ticket, to be closed by the caller, or -1 and errno. Of a GPU's memory it is
 * for cuMemImportFromShareableHandle; who maps it for more than reading
 * (CU_MEM_ACCESS_FLAGS_PROT_READ) could write what is to stay as it is. */
static inline int ptcfs_fetch_pages(const struct ptcfs_page_ticket *given) {
  struct ptcfs_page_ticket ticket = *given;
  ticket.socket[sizeof ticket.socket - 1] = 0;

  struct sockaddr_un address;
  memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, ticket.socket, sizeof ticket.socket);
  const int link = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (link < 0) return -1;
  const struct timeval patience = {5, 0};
  setsockopt(link, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(link, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);

  int found = -1, reason = 0;
  uint32_t error = 0;
  struct iovec said = {&error, sizeof error};
  union {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
  } control;
  memset(&control, 0, sizeof control);
  struct msghdr message;
  memset(&message, 0, sizeof message);
  message.msg_iov = &said;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  if (connect(link, (const struct sockaddr *)&address, sizeof address) != 0 ||
      send(link, ticket.token, sizeof ticket.token, MSG_NOSIGNAL) != sizeof ticket.token) {
    reason = errno;
  } else {
    const ssize_t got = recvmsg(link, &message, MSG_CMSG_CLOEXEC);
    const struct cmsghdr *header = got == sizeof error ? CMSG_FIRSTHDR(&message) : NULL;
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
      memcpy(&found, CMSG_DATA(header), sizeof found);
    else reason = got < 0 ? errno : got == sizeof error && error != 0 ? (int)error : EPIPE;
  }
  close(link);
  if (found < 0) errno = reason;
  return found;
}

/* The stored file behind an open one, as said above: a descriptor, to be closed by the caller, or
 * -1 and errno. `file` stays as it is. */
static inline int ptcfs_pages(int file) {
  struct ptcfs_page_ticket ticket;
  memset(&ticket, 0, sizeof ticket);
  if (ioctl(file, PTCFS_GET_PAGES, &ticket) != 0) return -1;
  if (ticket.kind != 0) return errno = EOPNOTSUPP, -1;
  return ptcfs_fetch_pages(&ticket);
}

#endif
