from services.trainer.service import main

main()
