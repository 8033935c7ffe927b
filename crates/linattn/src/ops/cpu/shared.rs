//! A buffer that tasks fill at the same time, each its own rows.

use super::real::Real;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

/// First number and `[count, stride, width]` of some rows.
pub(super) type Place = (usize, [usize; 3]);

/// A buffer whose rows are zeros when a task takes them: the thread that fills them next writes them, and no
/// thread writes all beforehand while others wait.
pub(super) struct Fresh<R> {
    numbers: Vec<MaybeUninit<R>>,
    /// Numbers that tasks have taken.
    taken: AtomicUsize,
}

impl<R: Real> Fresh<R> {
    pub(super) fn new(len: usize) -> Self {
        let mut numbers = Vec::with_capacity(len);
        numbers.resize_with(len, MaybeUninit::uninit);
        Self { numbers, taken: AtomicUsize::new(0) }
    }

    /// The buffer, to be filled: every row once.
    pub(super) fn shared(&mut self) -> Shared<'_, R> {
        Shared {
            start: self.numbers.as_mut_ptr().cast(),
            len: self.numbers.len(),
            taken: Some(&self.taken),
            buffer: PhantomData,
        }
    }

    /// All numbers.
    /// # Panics
    /// If tasks did not take every one of them.
    pub(super) fn filled(self) -> Vec<R> {
        assert_eq!(self.taken.into_inner(), self.numbers.len(), "tasks fill the whole buffer");
        let mut numbers = std::mem::ManuallyDrop::new(self.numbers);
        let (start, len, capacity) = (numbers.as_mut_ptr(), numbers.len(), numbers.capacity());
        // SAFETY: it is the vector's own memory. As many numbers as there are were taken, none of them twice, as
        // those who take them promise, and `rows` writes what it gives away.
        #[allow(unsafe_code)]
        unsafe {
            Vec::from_raw_parts(start.cast(), len, capacity)
        }
    }
}

/// A buffer that tasks may fill at the same time.
pub(super) struct Shared<'a, R> {
    start: *mut R,
    len: usize,
    /// Of a [`Fresh`] buffer: numbers that were taken.
    taken: Option<&'a AtomicUsize>,
    buffer: PhantomData<&'a mut [R]>,
}

// SAFETY: it stands for a `&mut [R]`, which may be sent; what several threads do with one is the promise
// of those who call `rows`.
#[allow(unsafe_code)]
unsafe impl<R: Send> Send for Shared<'_, R> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl<R: Send> Sync for Shared<'_, R> {}

impl<'a, R: Real> Shared<'a, R> {
    pub(super) fn new(buffer: &'a mut [R]) -> Self {
        let (start, len) = (buffer.as_mut_ptr(), buffer.len());
        Self { start, len, taken: None, buffer: PhantomData }
    }

    /// `count` rows of `width` numbers, the first at `first`, the next ones `stride` further each.
    /// # Panics
    /// If they reach beyond the buffer.
    /// # Safety
    /// No two of the rows that are alive at one time overlap; of a [`Fresh`] buffer, no two at all.
    #[allow(unsafe_code)]
    pub(super) unsafe fn rows(&self, (first, [count, stride, width]): Place) -> RowsMut<'_, R> {
        self.take(first, [count, stride, width]);
        let mut rows = RowsMut { shared: self, first, count, stride, width };
        if self.taken.is_some() {
            rows.clear();
        }
        rows
    }

    /// Where such rows begin, for one who writes every number of them and reads none before.
    /// # Panics
    /// If they reach beyond the buffer.
    /// # Safety
    /// As of [`rows`](Self::rows), and the rows are written before anybody else has the buffer.
    #[allow(unsafe_code)]
    pub(super) unsafe fn unwritten(&self, (first, [count, stride, width]): Place) -> *mut R {
        self.take(first, [count, stride, width]);
        // SAFETY: the first row is within the buffer.
        unsafe { self.start.add(first) }
    }

    /// Counts the numbers of rows that are within the buffer.
    fn take(&self, first: usize, [count, stride, width]: [usize; 3]) {
        let end = first + count.saturating_sub(1) * stride + width;
        assert!(count == 0 || end <= self.len, "rows within the buffer");
        if let Some(taken) = self.taken {
            taken.fetch_add(count * width, Ordering::Relaxed);
        }
    }
}

/// Rows of a buffer that one task fills.
pub(super) struct RowsMut<'a, R> {
    shared: &'a Shared<'a, R>,
    first: usize,
    count: usize,
    stride: usize,
    width: usize,
}

impl<R: Real> RowsMut<'_, R> {
    /// Writes zeros, to memory that may hold nothing yet.
    fn clear(&mut self) {
        let (count, width) = match self.stride == self.width {
            true => (1.min(self.count), self.count * self.width),
            false => (self.count, self.width),
        };
        for i in 0..count {
            // SAFETY: `rows` has checked that all rows are within the buffer, and its caller that nobody else has
            // any part of them. Zeros of `Real` are bits of zero.
            #[allow(unsafe_code)]
            unsafe {
                self.shared.start.add(self.first + i * self.stride).write_bytes(0, width);
            }
        }
    }

    /// Row `i`.
    #[inline(always)]
    pub(super) fn at(&mut self, i: usize) -> &mut [R] {
        assert!(i < self.count, "row {i} of {}", self.count);
        // SAFETY: `rows` has checked that all rows are within the buffer, and its caller that nobody else
        // has any part of them; the borrow of `self` keeps this from giving two at once.
        #[allow(unsafe_code)]
        unsafe {
            let start = self.shared.start.add(self.first + i * self.stride);
            std::slice::from_raw_parts_mut(start, self.width)
        }
    }
}

/// Rows of a buffer that is read.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, R> {
    data: &'a [R],
    stride: usize,
    width: usize,
}

impl<'a, R> Rows<'a, R> {
    /// Rows of `width` numbers, the first at `first`, the next ones `stride` further each.
    pub(super) fn new(data: &'a [R], first: usize, [stride, width]: [usize; 2]) -> Self {
        Self { data: &data[first..], stride, width }
    }

    /// Row `i`.
    #[inline(always)]
    pub(super) fn at(&self, i: usize) -> &'a [R] {
        &self.data[i * self.stride..][..self.width]
    }
}

/// Rows of a buffer that is read.
pub(super) fn rows_at<R>(x: &[R], (first, [_, stride, width]): Place) -> Rows<'_, R> {
    Rows::new(x, first, [stride, width])
}
