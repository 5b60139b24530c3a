//! Descriptors that travel with bytes over a unix socket. Source: unix(7), SCM_RIGHTS; cmsg(3).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// Descriptors of one message.
pub const DESCRIPTORS_MAX: usize = 8;

/// Room for the control message of so many. Words, because a `cmsghdr` is aligned like one.
type Control = [u64; 8];

const _: () = assert!(size_of::<libc::cmsghdr>() + DESCRIPTORS_MAX * size_of::<RawFd>() <= size_of::<Control>());

/// Sends `bytes` and copies of `passed` in one message. Blocks as the socket does.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<usize> {
    assert!(passed.len() <= DESCRIPTORS_MAX, "{} descriptors do not go into one message", passed.len());
    let len = u32::try_from(size_of_val(passed)).expect("a few words");
    let mut control = Control::default();
    let mut piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut message = message(&mut piece, &mut control);
    if passed.is_empty() {
        message.msg_controllen = 0;
    } else {
        // SAFETY: pure arithmetic.
        let (space, whole) = unsafe { (libc::CMSG_SPACE(len), libc::CMSG_LEN(len)) };
        message.msg_controllen = space as usize;
        // SAFETY: the control buffer has room for a header (asserted above), so this points into it.
        let header = unsafe { libc::CMSG_FIRSTHDR(&message) };
        // SAFETY: it is aligned, as the buffer is made of words, and nobody else refers to it.
        let header = unsafe { &mut *header };
        (header.cmsg_level, header.cmsg_type, header.cmsg_len) = (libc::SOL_SOCKET, libc::SCM_RIGHTS, whole as usize);
        for (at, descriptor) in passed.iter().enumerate() {
            // SAFETY: the data of the message has room for all of `passed` (asserted above).
            unsafe { libc::CMSG_DATA(header).cast::<RawFd>().add(at).write_unaligned(descriptor.as_raw_fd()) };
        }
    }
    // SAFETY: `message` points to `bytes` and `control`, which outlive the call; the kernel only reads them.
    retried(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
}

/// Receives one message: how many bytes of `bytes` it fills, and the descriptors that came with it, which close on exec.
pub fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = Control::default();
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut message = message(&mut piece, &mut control);
    // SAFETY: `message` points to `bytes` and `control`, which outlive the call and which nobody else refers to.
    let got = retried(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) })?;
    let mut received = Vec::new();
    // SAFETY: the kernel has filled the control buffer and set its length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&message) };
    while !header.is_null() {
        // SAFETY: it points to a header within the control buffer.
        let (level, kind, len) = unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: pure arithmetic.
            let data_len = len.saturating_sub(unsafe { libc::CMSG_LEN(0) } as usize);
            for at in 0..data_len / size_of::<RawFd>() {
                // SAFETY: within the data of this control message, whose length the kernel gave.
                let descriptor = unsafe { libc::CMSG_DATA(header).cast::<RawFd>().add(at).read_unaligned() };
                // SAFETY: the kernel has opened it for this call, and nobody else knows it.
                received.push(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
        // SAFETY: `header` is one of `message`'s.
        header = unsafe { libc::CMSG_NXTHDR(&message, header) };
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "more descriptors came than fit into one message"));
    }
    Ok((got, received))
}

fn message(piece: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: it is plain data, of which all zeros are a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (ptr::from_mut(piece), 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of::<Control>());
    message
}

fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Goal: bytes and descriptors arrive together, and the descriptors are of the same files. Method: none, one, and as
    /// many as there may be; each is a pipe's end whose other end is read.
    #[test]
    fn descriptors_arrive() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        for count in [0, 1, DESCRIPTORS_MAX] {
            let pairs: Vec<_> = (0..count).map(|_| UnixStream::pair().expect("a pair")).collect();
            let passed: Vec<_> = pairs.iter().map(|(one, _)| one.as_fd()).collect();
            assert_eq!(send(ours.as_fd(), b"hello", &passed).expect("sends"), 5);
            let mut bytes = [0; 16];
            let (got, received) = receive(theirs.as_fd(), &mut bytes).expect("receives");
            assert_eq!((&bytes[..got], received.len()), (&b"hello"[..], count));
            for (descriptor, (_, mut other)) in received.into_iter().zip(pairs) {
                File::from(descriptor).write_all(b"x").expect("writes");
                other.read_exact(&mut [0]).expect("reads");
            }
        }
        drop(ours);
        assert_eq!(receive(theirs.as_fd(), &mut [0; 16]).expect("the end").0, 0);
    }
}
