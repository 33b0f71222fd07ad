package main

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"code.cloudfoundry.org/garden"
)

// A new terminal: our end, and that of a process.
func openTerminal(size *garden.WindowSize) (*os.File, *os.File, error) {
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var locked int32
	var number uint32
	err = ioctl(ours, syscall.TIOCSPTLCK, unsafe.Pointer(&locked))
	if err == nil {
		err = ioctl(ours, syscall.TIOCGPTN, unsafe.Pointer(&number))
	}
	if err == nil && size != nil {
		err = resize(ours, size)
	}
	if err != nil {
		_ = ours.Close()
		return nil, nil, err
	}
	theirs, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		_ = ours.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

func resize(terminal *os.File, size *garden.WindowSize) error {
	window := [4]uint16{uint16(size.Rows), uint16(size.Columns)}
	return ioctl(terminal, syscall.TIOCSWINSZ, unsafe.Pointer(&window))
}

func ioctl(file *os.File, request uintptr, argument unsafe.Pointer) error {
	_, _, failed := syscall.Syscall(syscall.SYS_IOCTL, file.Fd(), request, uintptr(argument))
	if failed != 0 {
		return failed
	}
	return nil
}
