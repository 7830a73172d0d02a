/* The benchmark's load and its internet: clients of a proxy, an origin, a name server. One thread, epoll, no library.
 *
 *   load world                                   origin on :443 and DNS on :53 of this namespace, until SIGTERM
 *   load connect ADDR PORT HOST CLIENTS SECONDS STATUS PACE_US   whole CONNECTs one after the other in each client;
 *                                                with STATUS 0 connections through something that knows no CONNECT
 *   load fetch ADDR PORT HOST BYTES DIRECT       one tunnel (or, DIRECT, none) that carries BYTES down
 *   load push ADDR PORT HOST BYTES DIRECT        the same upwards
 *   load hold ADDR PORT HOST COUNT               COUNT idle tunnels, until standard input ends
 *   load stall ADDR PORT HOST BYTES              one tunnel whose client asks for BYTES and reads none, until then
 *   load beat ADDR PORT HOST COUNT SECONDS PACE_US   COUNT tunnels, opened at once; once a byte has come on standard
 *                                                input, how long a byte takes to come back through them
 *   load slow ADDR PORT HOST COUNT HUNG          COUNT heads that never end and HUNG names that never answer, until then
 *   load first ADDR PORT HOST FILE PROGRAM...    start PROGRAM with FILE as its input and time its first refusal
 *
 * HOST may hold one %d, which is another number in each request. A CONNECT counts as done when its refusal's head or,
 * for 200, the origin's answer to a ClientHello with that name has come. Results are one line of JSON.
 *
 * Origin: one ClientHello, whose random starts with a number of 8 bytes; it answers with so many bytes, or for a
 * negative one answers one byte, takes so many and answers another; whatever comes after that is answered by one byte. DNS: A is 93.184.216.34 for 60 s, AAAA is empty, `hung...` is never answered. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PORT 443
#define HELLO 517
#define NUMBER 11 /* where a ClientHello's random is, in its record */
#define MOST 65536
#define DEADLINE_US 15000000

static void die(const char *what) { perror(what); exit(1); }

static int64_t now_us(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void more_descriptors(void) {
	struct rlimit limit;
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
}

static void nodelay(int fd) {
	int on = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* The world. */

enum { ORIGIN_HELLO, ORIGIN_SEND, ORIGIN_SINK, ORIGIN_END };
struct origin { int state; unsigned got; unsigned char start[HELLO + 64]; int64_t left; };
static struct origin *origins[MOST];
static char pattern[1 << 18];

static void origin_drop(int fd) {
	free(origins[fd]);
	origins[fd] = NULL;
	close(fd);
}

static void origin_send(int epoll, int fd, struct origin *o) {
	while (o->left > 0) {
		size_t size = o->left < (int64_t)sizeof pattern ? (size_t)o->left : sizeof pattern;
		ssize_t sent = send(fd, pattern, size, MSG_NOSIGNAL);
		if (sent < 0) {
			if (errno != EAGAIN) { origin_drop(fd); return; }
			struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.fd = fd};
			epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
			return;
		}
		o->left -= sent;
	}
	o->state = ORIGIN_END;
	struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
	epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
}

static void origin_event(int epoll, int fd) {
	struct origin *o = origins[fd];
	if (o->state == ORIGIN_HELLO) {
		ssize_t got = recv(fd, o->start + o->got, sizeof o->start - o->got, 0);
		if (got <= 0) { if (got == 0 || errno != EAGAIN) origin_drop(fd); return; }
		o->got += got;
		if (o->got < 5) return;
		unsigned record = 5 + (o->start[3] << 8 | o->start[4]);
		if (record < NUMBER + 8 || record > sizeof o->start) { origin_drop(fd); return; }
		if (o->got < record) return;
		for (int at = 0; at < 8; at++) o->left = o->left << 8 | o->start[NUMBER + at];
		o->state = o->left > 0 ? ORIGIN_SEND : ORIGIN_SINK;
		if (o->left < 0) {
			/* like any TLS server, it answers the hello before anything else comes */
			o->left += o->got - record;
			send(fd, "k", 1, MSG_NOSIGNAL);
		}
		if (o->state == ORIGIN_SEND) origin_send(epoll, fd, o);
		return;
	}
	if (o->state == ORIGIN_SEND) { origin_send(epoll, fd, o); return; }
	/* MSG_TRUNC: taken off the queue and not copied, so that the load costs little beside the proxy */
	ssize_t got = recv(fd, pattern, sizeof pattern, MSG_TRUNC);
	if (got > 0 && (o->state == ORIGIN_END || (o->left += got) >= 0)) {
		send(fd, "k", 1, MSG_NOSIGNAL);
		o->state = ORIGIN_END;
	}
	if (got == 0 || (got < 0 && errno != EAGAIN)) origin_drop(fd);
}

static void answer_name(int fd) {
	unsigned char m[1024];
	struct sockaddr_in6 peer;
	socklen_t size = sizeof peer;
	ssize_t got = recvfrom(fd, m, 512, 0, (struct sockaddr *)&peer, &size);
	if (got < 17) return;
	ssize_t at = 12;
	while (at < got && m[at]) at += m[at] + 1;
	at += 5;
	if (at > got || (m[12] >= 4 && !memcmp(m + 13, "hung", 4))) return;
	int is_a = m[at - 3] == 1;
	m[2] = 0x81; m[3] = 0x80;
	m[6] = 0; m[7] = is_a;
	m[8] = m[9] = m[10] = m[11] = 0;
	if (is_a) {
		static const unsigned char record[] = {0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 93, 184, 216, 34};
		memcpy(m + at, record, sizeof record);
		at += sizeof record;
	}
	sendto(fd, m, at, 0, (struct sockaddr *)&peer, size);
}

/* Answers must come from the address that was asked, so the name server has one of its own. */
static int bound(int kind, int port, const char *address) {
	int on = 1, fd = socket(AF_INET6, kind | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	struct sockaddr_in6 here = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	inet_pton(AF_INET6, address, &here.sin6_addr);
	if (fd < 0 || bind(fd, (struct sockaddr *)&here, sizeof here) || (kind == SOCK_STREAM && listen(fd, 4096))) die("bind");
	return fd;
}

static void world(void) {
	int epoll = epoll_create1(EPOLL_CLOEXEC), listener = bound(SOCK_STREAM, PORT, "::"), names = bound(SOCK_DGRAM, 53, "::ffff:93.184.216.53");
	int watched[] = {listener, names};
	for (int at = 0; at < 2; at++) {
		struct epoll_event event = {.events = EPOLLIN, .data.fd = watched[at]};
		epoll_ctl(epoll, EPOLL_CTL_ADD, watched[at], &event);
	}
	puts("ready");
	fflush(stdout);
	for (;;) {
		struct epoll_event events[256];
		int count = epoll_wait(epoll, events, 256, -1);
		for (int at = 0; at < count; at++) {
			int fd = events[at].data.fd;
			if (fd == names) { answer_name(fd); continue; }
			if (fd != listener) { if (origins[fd]) origin_event(epoll, fd); continue; }
			for (int more; (more = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
				if (more >= MOST) { close(more); continue; }
				nodelay(more);
				origins[more] = calloc(1, sizeof(struct origin));
				struct epoll_event event = {.events = EPOLLIN, .data.fd = more};
				epoll_ctl(epoll, EPOLL_CTL_ADD, more, &event);
			}
		}
	}
}

/* The clients. */

static struct sockaddr_in proxy;
static const char *pattern_host;
static unsigned number;

static void name_of(char *host, size_t size) { snprintf(host, size, pattern_host, number++); }

static int request(char *out, size_t size, const char *host) {
	return snprintf(out, size, "CONNECT %s:%d HTTP/1.1\r\nHost: %s:%d\r\nUser-Agent: load\r\n\r\n", host, PORT, host, PORT);
}

/* A ClientHello of 517 bytes, as common clients send it, with the number for the origin. */
static int hello(unsigned char *out, const char *host, int64_t count) {
	static const unsigned char middle[] = {0, 6, 0x13, 1, 0x13, 2, 0x13, 3, 1, 0};
	int name = strlen(host), at = 0;
	memset(out, 0, HELLO);
	out[at++] = 22; out[at++] = 3; out[at++] = 1; out[at++] = (HELLO - 5) >> 8; out[at++] = (HELLO - 5) & 255;
	out[at++] = 1; out[at++] = 0; out[at++] = (HELLO - 9) >> 8; out[at++] = (HELLO - 9) & 255;
	out[at++] = 3; out[at++] = 3; at += 32; out[at++] = 32; at += 32;
	memcpy(out + at, middle, sizeof middle); at += sizeof middle;
	int extensions = HELLO - at - 2;
	out[at++] = extensions >> 8; out[at++] = extensions & 255;
	at += 2; out[at++] = 0; out[at++] = name + 5; out[at++] = 0; out[at++] = name + 3; at += 2; out[at++] = name;
	memcpy(out + at, host, name); at += name;
	at++; out[at++] = 43; at++; out[at++] = 3; out[at++] = 2; out[at++] = 3; out[at++] = 4;
	int padding = HELLO - at - 4;
	at++; out[at++] = 21; out[at++] = padding >> 8; out[at++] = padding & 255;
	for (int byte = 0; byte < 8; byte++) out[NUMBER + byte] = count >> (56 - 8 * byte);
	return HELLO;
}

enum { IDLE, CONNECTING, HEAD, REPLY };
struct client { int fd, state; unsigned got; int64_t start, next; char host[300], head[4096]; };

static void say(int fd, const void *data, size_t size) { if (send(fd, data, size, MSG_NOSIGNAL) < 0) return; }

static void start(int epoll, struct client *c) {
	c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (c->fd < 0) die("socket");
	nodelay(c->fd);
	c->got = 0;
	c->start = now_us();
	c->state = CONNECTING;
	name_of(c->host, sizeof c->host);
	if (connect(c->fd, (struct sockaddr *)&proxy, sizeof proxy) && errno != EINPROGRESS) { close(c->fd); c->state = IDLE; return; }
	struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = c};
	epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
}

/* 1 when done as expected, -1 when it went otherwise, 0 when there is more to come */
static int advance(struct client *c, unsigned events, int expected, int64_t count) {
	if (c->state == CONNECTING) {
		if (!(events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) return 0;
		if (expected) {
			char out[1024];
			int size = request(out, sizeof out, c->host);
			if (send(c->fd, out, size, MSG_NOSIGNAL) != size) return -1;
			c->state = HEAD;
		} else {
			unsigned char out[HELLO];
			int size = hello(out, c->host, count);
			if (send(c->fd, out, size, MSG_NOSIGNAL) != size) return -1;
			c->state = REPLY;
		}
	}
	if (c->state == HEAD) {
		ssize_t got = recv(c->fd, c->head + c->got, sizeof c->head - 1 - c->got, 0);
		if (got == 0) return -1;
		if (got < 0) return errno == EAGAIN ? 0 : -1;
		c->got += got;
		c->head[c->got] = 0;
		if (!strstr(c->head, "\r\n\r\n")) return 0;
		if (c->got < 12 || atoi(c->head + 9) != expected) return -1;
		if (expected != 200) return 1;
		unsigned char out[HELLO];
		int size = hello(out, c->host, count);
		if (send(c->fd, out, size, MSG_NOSIGNAL) != size) return -1;
		c->state = REPLY;
	}
	char byte[64];
	ssize_t got = recv(c->fd, byte, sizeof byte, 0);
	if (got < 0 && errno == EAGAIN) return 0;
	return got == 1 ? 1 : -1;
}

static int by_size(const void *left, const void *right) {
	int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;
	return (a > b) - (a < b);
}

static int connects(int clients, double seconds, int expected, int64_t pace) {
	int epoll = epoll_create1(EPOLL_CLOEXEC);
	struct client *all = calloc(clients, sizeof *all);
	size_t room = 1 << 21, done = 0, errors = 0;
	int32_t *took = malloc(room * sizeof *took);
	int64_t begin = now_us(), end = begin + (int64_t)(seconds * 1e6);
	for (int at = 0; at < clients; at++) all[at].next = begin + (pace ? pace * at / clients : 0);
	for (int64_t now = begin; now < end; now = now_us()) {
		for (int at = 0; at < clients; at++) {
			struct client *c = &all[at];
			if (c->state == IDLE && now >= c->next) start(epoll, c);
			else if (c->state != IDLE && now - c->start > DEADLINE_US) { close(c->fd); c->state = IDLE; errors++; }
		}
		struct epoll_event events[256];
		int count = epoll_wait(epoll, events, 256, pace ? 1 : 100);
		for (int at = 0; at < count; at++) {
			struct client *c = events[at].data.ptr;
			int result = advance(c, events[at].events, expected, 1);
			if (!result) continue;
			int64_t then = now_us();
			if (result > 0) { if (done < room) took[done++] = then - c->start; } else errors++;
			close(c->fd);
			c->state = IDLE;
			c->next = c->start + pace > then ? c->start + pace : then;
			if (!pace) start(epoll, c);
		}
	}
	double whole = (now_us() - begin) / 1e6;
	qsort(took, done, sizeof *took, by_size);
	printf("{\"done\":%zu,\"errors\":%zu,\"seconds\":%.6f,\"p50_us\":%d,\"p99_us\":%d,\"max_us\":%d}\n", done, errors, whole,
		done ? took[done / 2] : 0, done ? took[done * 99 / 100] : 0, done ? took[done - 1] : 0);
	return 0;
}

static int opened(const char *host, int64_t count, int direct) {
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct timeval limit = {60, 0};
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	nodelay(fd);
	if (connect(fd, (struct sockaddr *)&proxy, sizeof proxy)) die("connect");
	if (!direct) {
		char out[1024], head[4096];
		say(fd, out, request(out, sizeof out, host));
		size_t got = 0;
		/* byte by byte, to take nothing of what follows */
		while (got < sizeof head - 1 && (got < 4 || memcmp(head + got - 4, "\r\n\r\n", 4)))
			if (recv(fd, head + got, 1, 0) == 1) got++; else die("no head came");
		if (memcmp(head + 9, "200", 3)) { fprintf(stderr, "refused: %.*s\n", (int)got, head); exit(1); }
	}
	unsigned char out[HELLO];
	say(fd, out, hello(out, host, count));
	return fd;
}

static int moved(const char *host, int64_t bytes, int direct, int up) {
	static char buffer[1 << 20];
	int fd = opened(host, up ? -bytes : bytes, direct);
	if (up && recv(fd, buffer, 1, 0) != 1) die("no answer through a tunnel");
	int64_t begin = now_us(), left = bytes;
	while (left > 0) {
		size_t size = left < (int64_t)sizeof buffer ? (size_t)left : sizeof buffer;
		ssize_t got = up ? send(fd, buffer, size, MSG_NOSIGNAL) : recv(fd, buffer, size, MSG_TRUNC);
		if (got <= 0) die("the stream broke");
		left -= got;
	}
	if (up && recv(fd, buffer, 1, 0) != 1) die("no word of the end");
	double seconds = (now_us() - begin) / 1e6;
	printf("{\"bytes\":%lld,\"seconds\":%.6f}\n", (long long)bytes, seconds);
	close(fd);
	return 0;
}

static void until_input_ends(void) {
	char byte;
	puts("ready");
	fflush(stdout);
	while (read(0, &byte, 1) > 0) continue;
}

static int stall(const char *host, int64_t bytes) {
	opened(host, bytes, 0);
	until_input_ends();
	return 0;
}

static int hold(int count) {
	for (int at = 0; at < count; at++) {
		char host[300], byte;
		name_of(host, sizeof host);
		if (recv(opened(host, 1, 0), &byte, 1, 0) != 1) die("no answer through a tunnel");
	}
	until_input_ends();
	return 0;
}

static int beat(const char *host, int count, double seconds, int64_t pace) {
	int *fds = calloc(count, sizeof *fds);
	size_t room = 1 << 20, done = 0, errors = 0;
	int32_t *took = malloc(room * sizeof *took);
	char byte;
	for (int at = 0; at < count; at++) {
		fds[at] = opened(host, 1, 0);
		if (recv(fds[at], &byte, 1, 0) != 1) die("no answer through a tunnel");
	}
	puts("ready");
	fflush(stdout);
	if (read(0, &byte, 1) < 0) die("read");
	int64_t begin = now_us(), end = begin + (int64_t)(seconds * 1e6);
	for (int at = 0; now_us() < end && done < room; at++) {
		int64_t then = now_us();
		say(fds[at % count], "b", 1);
		if (recv(fds[at % count], &byte, 1, 0) == 1) took[done++] = now_us() - then; else errors++;
		if (now_us() < then + pace) usleep(then + pace - now_us());
	}
	qsort(took, done, sizeof *took, by_size);
	printf("{\"done\":%zu,\"errors\":%zu,\"p50_us\":%d,\"p99_us\":%d}\n", done, errors,
		done ? took[done / 2] : 0, done ? took[done * 99 / 100] : 0);
	return 0;
}

/* -1 where the proxy turned it away at once: to be tried again in the next round */
static int knocked(void) {
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (!connect(fd, (struct sockaddr *)&proxy, sizeof proxy)) return fd;
	if (errno != ECONNRESET && errno != ECONNREFUSED && errno != ETIMEDOUT) die("connect");
	close(fd);
	return -1;
}

static int slow(int count, int hung) {
	int *fds = calloc(count, sizeof *fds), *hanging = calloc(hung, sizeof *hanging);
	for (int at = 0; at < hung; at++) hanging[at] = -1;
	for (int at = 0; at < count; at++) fds[at] = -1;
	fcntl(0, F_SETFL, O_NONBLOCK);
	for (int round = 0;; round++) {
		char byte, out[1024], host[300];
		for (int at = 0; at < count; at++) {
			/* a byte now and then; what was closed comes back */
			if (fds[at] >= 0 && send(fds[at], "X", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 && recv(fds[at], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) continue;
			if (fds[at] >= 0) close(fds[at]);
			if ((fds[at] = knocked()) >= 0) say(fds[at], "CONNECT e", 9);
		}
		for (int at = 0; at < hung; at++) {
			if (hanging[at] >= 0 && recv(hanging[at], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN) continue;
			if (hanging[at] >= 0) close(hanging[at]);
			if ((hanging[at] = knocked()) < 0) continue;
			snprintf(host, sizeof host, "hung%u.example.com", number++);
			say(hanging[at], out, request(out, sizeof out, host));
		}
		if (!round) { puts("ready"); fflush(stdout); }
		usleep(500000);
		if (read(0, &byte, 1) == 0) return 0;
	}
}

static int first(char **program, const char *input) {
	int64_t begin = now_us();
	int feed[2];
	if (pipe(feed)) die("pipe");
	pid_t child = fork();
	if (!child) {
		dup2(feed[0], 0);
		close(feed[0]);
		close(feed[1]);
		int null = open("/dev/null", O_WRONLY);
		dup2(null, 1);
		dup2(null, 2);
		execv(program[0], program);
		_exit(127);
	}
	close(feed[0]);
	if (*input) {
		static char text[1 << 20];
		int fd = open(input, O_RDONLY);
		ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text);
		if (size < 0 || write(feed[1], text, size) != size) die(input);
	}
	for (;;) {
		char host[300], out[1024], head[64];
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (!connect(fd, (struct sockaddr *)&proxy, sizeof proxy)) {
			name_of(host, sizeof host);
			say(fd, out, request(out, sizeof out, host));
			if (recv(fd, head, sizeof head, 0) > 12) break;
		}
		close(fd);
		if (now_us() - begin > DEADLINE_US) { kill(child, SIGKILL); fputs("it never answered\n", stderr); return 1; }
		usleep(200);
	}
	printf("{\"ms\":%.3f}\n", (now_us() - begin) / 1e3);
	fflush(stdout);
	close(feed[1]);
	kill(child, SIGTERM);
	usleep(20000);
	for (int at = 0; at < 100 && !waitpid(child, NULL, WNOHANG); at++) usleep(50000);
	kill(child, SIGKILL);
	return 0;
}

int main(int argc, char **argv) {
	signal(SIGPIPE, SIG_IGN);
	more_descriptors();
	if (argc == 2 && !strcmp(argv[1], "world")) world();
	if (argc < 5) { fputs("see the head of load.c\n", stderr); return 64; }
	proxy.sin_family = AF_INET;
	proxy.sin_port = htons(atoi(argv[3]));
	if (inet_pton(AF_INET, argv[2], &proxy.sin_addr) != 1) return 64;
	pattern_host = argv[4];
	const char *what = argv[1];
	if (!strcmp(what, "connect") && argc == 9) return connects(atoi(argv[5]), atof(argv[6]), atoi(argv[7]), atoll(argv[8]));
	if (!strcmp(what, "fetch") && argc == 7) return moved(argv[4], atoll(argv[5]), atoi(argv[6]), 0);
	if (!strcmp(what, "push") && argc == 7) return moved(argv[4], atoll(argv[5]), atoi(argv[6]), 1);
	if (!strcmp(what, "stall") && argc == 6) return stall(argv[4], atoll(argv[5]));
	if (!strcmp(what, "hold") && argc == 6) return hold(atoi(argv[5]));
	if (!strcmp(what, "beat") && argc == 8) return beat(argv[4], atoi(argv[5]), atof(argv[6]), atoll(argv[7]));
	if (!strcmp(what, "slow") && argc == 7) return slow(atoi(argv[5]), atoi(argv[6]));
	if (!strcmp(what, "first") && argc > 6) return first(argv + 6, argv[5]);
	fputs("see the head of load.c\n", stderr);
	return 64;
}
